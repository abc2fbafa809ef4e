"""Faults made by hand, and the test that finds each: what the suite protects, measured.

    python -m lab.faults                       every fault, one after the other
    python -m lab.faults --only wgrad_stream   one of them (may be repeated)
    python -m lab.faults --all-tests           the whole suite for each, not only the tests that are named beside it
    python -m lab.faults --list

A fault is a wrong sign, scale, seed, stream, key, rename, lock and so on: one text of one file is replaced by another.
The command copies the tracked files of the checkout into a temporary folder, replaces the text there, and runs the
tests that are named beside the fault until one fails. This test finds the fault. A fault that no test finds is a
missing test.

Files move. A text that is not in its file any more is looked for in all other files of the package, and must be there
exactly once.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOMS = ("nanochat_fp4", "kernels", "scripts", "eval")  # where a text that has moved is looked for


class Fault(NamedTuple):
    """name; the file; its text and what replaces it; pytest's arguments for the tests that should find it."""

    name: str
    file: str
    old: str
    new: str
    tests: str


NVFP4 = [
    Fault("nibbles_swapped", "nanochat_fp4/nvfp4/format.py",
          "codes[..., 0::2] | (codes[..., 1::2] << 4)", "codes[..., 1::2] | (codes[..., 0::2] << 4)",
          "tests/nvfp4/test_format.py"),
    Fault("scale_tiles_permuted", "nanochat_fp4/nvfp4/format.py",
          "padded_cols // 4, 4).permute(0, 3, 2, 1, 4)\n    return tiles.reshape(-1)",
          "padded_cols // 4, 4).permute(0, 3, 1, 2, 4)\n    return tiles.reshape(-1)",
          "tests/nvfp4/test_format.py"),
    Fault("signs_of_columns", "nanochat_fp4/nvfp4/hadamard.py",
          "signs.unsqueeze(1) * _sylvester(dim)", "signs.unsqueeze(0) * _sylvester(dim)",
          "tests/nvfp4/test_hadamard.py tests/kernels/test_kernels_rotate.py"),
    Fault("philox_one_round_less", "nanochat_fp4/nvfp4/philox.py",
          "ROUNDS = 10", "ROUNDS = 9", "tests/nvfp4/test_philox.py"),
    Fault("scale_noise_in_another_lane", "nanochat_fp4/nvfp4/philox.py",
          ".permute(0, 3, 1, 2, 4).reshape(-1, blocks)[:rows]", ".permute(0, 1, 3, 2, 4).reshape(-1, blocks)[:rows]",
          "tests/nvfp4/test_philox.py tests/kernels/test_kernels_scales.py tests/kernels/test_kernels_rotate.py"),
    Fault("subnormal_scales_biased", "nanochat_fp4/nvfp4/quantizers.py",
          "up = (uniform < n - floor)", "up = (uniform < (n - floor) * (floor >= 8))",
          "tests/nvfp4/test_quantizers.py"),
    Fault("four_over_six_second_scale", "nanochat_fp4/nvfp4/quantizers.py",
          "FOUR_OVER_SIX = (1.0, 3 / 2)", "FOUR_OVER_SIX = (1.0, 4 / 3)", "tests/nvfp4/test_quantizers.py"),
    Fault("eden_correction_inverted", "nanochat_fp4/nvfp4/quantizers.py",
          "torch.where(xq > 0, xx / xq, 1.0)", "torch.where(xq > 0, xq / xx, 1.0)", "tests/nvfp4/test_quantizers.py"),
    Fault("wgrad_stream", "nanochat_fp4/nvfp4/recipes.py",
          "stream=operand,", "stream=operand - operand // 4 * 2,",
          "tests/nvfp4/test_linear.py tests/nvfp4/test_tensor_parallel.py"),
    Fault("operands_rotated_apart", "nanochat_fp4/nvfp4/recipes.py",
          "rht_stream=stream_of_signs,", "rht_stream=operand,", "tests/nvfp4/test_linear.py"),
    Fault("one_tensor_scale_of_two", "nanochat_fp4/nvfp4/gemm.py",
          "else scales[0] * scales[1])", "else scales[0] * scales[0])",
          "tests/nvfp4/test_gemm.py tests/nvfp4/test_linear.py"),
    Fault("accumulation_overwrites", "nanochat_fp4/nvfp4/gemm.py",
          "into.add_(self.result(torch.float32))", "into.copy_(self.result(torch.float32))",
          "tests/nvfp4/test_accumulation.py"),
    Fault("weight_codes_stale", "nanochat_fp4/nvfp4/layer_context.py",
          "changes = 0 if weight.is_inference() else weight._version", "changes = 0",
          "tests/nvfp4/test_contexts.py tests/nvfp4/test_convert.py tests/nvfp4/test_quantized_training.py"),
    Fault("feedback_sign", "nanochat_fp4/nvfp4/feedback.py",
          "wanted[..., done + BLOCK :] += error", "wanted[..., done + BLOCK :] -= error",
          "tests/nvfp4/test_feedback.py"),
    Fault("gram_matrix_of_one_rank", "nanochat_fp4/nvfp4/gram_matrices.py",
          "            dist.all_reduce(products)\n", "", "tests/nvfp4/test_feedback.py"),
    Fault("shards_smallest_amax", "nanochat_fp4/nvfp4/sharding.py",
          "dist.all_reduce(together, op=dist.ReduceOp.MAX", "dist.all_reduce(together, op=dist.ReduceOp.MIN",
          "tests/nvfp4/test_sharding.py tests/training/test_parallel.py"),
    Fault("phase_one_step_late", "nanochat_fp4/nvfp4/phases.py",
          "if progress >= fraction:", "if progress > fraction:",
          "tests/nvfp4/test_phases.py tests/nvfp4/test_quantized_training.py"),
]  # fmt: skip
KERNELS = [
    Fault("last_program_dropped", "kernels/nvfp4_kernels/quantize.py",
          "programs = triton.cdiv(blocks, nb * per_program)", "programs = max(1, blocks // (nb * per_program))",
          "tests/kernels/test_kernels_quantize.py"),
    Fault("finish_draws_from_another_pair", "kernels/nvfp4_kernels/scales.py",
          "place_block // 2 + first * 4", "place_block // 2 + first * 8",
          "tests/kernels/test_kernels_scales.py tests/kernels/test_kernels_rotate.py"),
    Fault("repair_leaves_the_last_group", "kernels/nvfp4_kernels/scales.py",
          "tl.minimum(first + GROUPS, groups)):", "tl.minimum(first + GROUPS - 1, groups)):",
          "tests/kernels/test_kernels_scales.py tests/kernels/test_kernels_rotate.py"),
    Fault("eden_correction_of_the_kernel", "kernels/nvfp4_kernels/rotate_kernel.py",
          "tl.math.div_rn(xx, tl.where(xq > 0, xq, 1.0))", "tl.math.div_rn(xq, tl.where(xx > 0, xx, 1.0))",
          "tests/kernels/test_kernels_rotate.py"),
    Fault("swizzle_lane", "kernels/nvfp4_kernels/matmul.py",
          "lane % 32 * 16 + lane // 32 * 4", "lane % 32 * 16 + (lane // 32 + 1) % 4 * 4",
          "tests/kernels/test_kernels_matmul.py"),
    Fault("padded_vocabulary_counts", "kernels/nvfp4_kernels/cross_entropy.py",
          "total += tl.where(column < vocab, tl.exp2", "total += tl.where(column < columns, tl.exp2",
          "tests/kernels/test_kernels_cross_entropy.py tests/models/test_cross_entropy.py"),
    Fault("transposed_pairs_swapped", "kernels/nvfp4_kernels/decode.py",
          "(even | (odd << 4)).to(tl.uint8)", "(odd | (even << 4)).to(tl.uint8)",
          "tests/kernels/test_kernels_quantize.py tests/kernels/test_kernels_matmul.py"),
    Fault("rounding_noise_of_another_row", "kernels/nvfp4_kernels/accumulate.py",
          "first_row.to(tl.int64) * row_groups", "first_row.to(tl.int64) * groups",
          "tests/kernels/test_kernels_accumulate.py"),
]  # fmt: skip
MODELS = [
    Fault("window_one_key_wider", "nanochat_fp4/models/flash_attention.py",
          "mask = mask & (query - key <= left)", "mask = mask & (query - key <= left + 1)",
          "tests/models/test_flash_attention.py"),
    Fault("rotary_gradient_sign", "nanochat_fp4/models/elementwise.py",
          "sign = 2 * torch.arange(2", "sign = 1 - 2 * torch.arange(2", "tests/models/test_gpt.py"),
    Fault("decay_where_signs_differ", "nanochat_fp4/models/optim.py",
          "agrees = (update * params) >= 0", "agrees = (update * params) <= 0", "tests/models/test_optim.py"),
    Fault("no_wait_for_the_owner", "nanochat_fp4/models/optim_ranks.py",
          "        weights_work.wait()\n", "", "tests/models/test_optim.py tests/training/test_parallel.py"),
    Fault("ranks_share_rounding_noise", "nanochat_fp4/models/optim8bit.py",
          "GRADIENT + added[p] * world_size + rank", "GRADIENT + added[p] * world_size",
          "tests/models/test_optim8bit.py"),
]  # fmt: skip
TRAINING = [
    Fault("checkpoint_key", "nanochat_fp4/training/checkpoint.py",
          "part.get(POSITION)", 'part.get("loader")',
          "tests/training/test_resume_changes.py tests/training/test_checkpoint_manager.py"),
    Fault("lost_rename", "nanochat_fp4/files.py",
          "        os.replace(tmp, path)\n", "        path.write_bytes(tmp.read_bytes())\n        os.unlink(tmp)\n",
          "tests/test_files.py tests/training/test_checkpoint_manager.py"),
    Fault("position_one_batch_ahead", "nanochat_fp4/training/loop.py",
          "            run.position = run.next_position\n            if run.data.ahead:\n                fetch(run)\n",
          "            if run.data.ahead:\n                fetch(run)\n            run.position = run.next_position\n",
          "tests/training/test_resume_changes.py tests/scripts/test_base_train.py"),
    Fault("gradients_not_averaged", "nanochat_fp4/training/step.py",
          "(loss / count).backward()", "loss.backward()",
          "tests/scripts/test_base_train.py tests/training/test_resume_changes.py"),
    Fault("lock_not_taken", "nanochat_fp4/locks.py",
          "lock.acquire(timeout=ASKED_SECONDS)", "lock.is_locked", "tests/training/test_run_folder.py"),
]  # fmt: skip
DATA = [
    Fault("targets_not_shifted", "nanochat_fp4/data/packing.py",
          "batch[:, 1:].clone()", "batch[:, :-1].clone()", "tests/data/test_dataloader.py"),
    Fault("lane_off_by_one", "nanochat_fp4/data/packing.py",
          "lane, place = k % self.lanes, k // self.lanes", "lane, place = k % self.lanes, k // self.lanes + 1",
          "tests/data/test_dataloader.py"),
    Fault("mask_of_the_token_before", "nanochat_fp4/data/chat_loader.py",
          "torch.where(mask[:, 1:] == 1", "torch.where(mask[:, :-1] == 1",
          "tests/data/test_chat_data.py tests/training/test_post_training.py"),
    Fault("tool_results_are_learned", "nanochat_fp4/data/tokenizer.py",
          'add_between("output", part["text"], 0, 0)', 'add_between("output", part["text"], 0, 1)',
          "tests/data/test_tokenizer.py"),
]  # fmt: skip
OUTWARDS = [
    Fault("export_scale_not_inverted", "nanochat_fp4/export/huggingface.py",
          "tensor.tensor_scale.reshape(1).reciprocal()", "tensor.tensor_scale.reshape(1).clone()",
          "tests/export/test_export.py"),
    Fault("export_rows_of_the_first_layer", "nanochat_fp4/export/weights.py",
          "rows = slice(start, start := start + layer.out_features)", "rows = slice(start, start + layer.out_features)",
          "tests/export/test_export.py"),
    Fault("answer_one_token_late", "nanochat_fp4/evaluation/core_eval.py",
          "F.cross_entropy(logits[row, start - 1 : end - 1].float()", "F.cross_entropy(logits[row, start:end].float()",
          "tests/evaluation tests/training/test_post_training.py"),
    Fault("gap_in_the_other_direction", "nanochat_fp4/evaluation/report_runs.py",
          '100 * (run["val_bpb"] / base["val_bpb"] - 1)', '100 * (1 - run["val_bpb"] / base["val_bpb"])',
          "tests/evaluation/test_report.py"),
    Fault("both_losses_of_one_forward", "scripts/base_loss.py",
          '            results[f"{split}_bpb_bf16"] = measured\n        line', "            pass\n        line",
          "tests/evaluation tests/scripts tests/training/test_post_training.py"),
    Fault("evaluated_in_the_wrong_forward", "scripts/chat_eval.py",
          'with nf.full_precision(model) if precision == "bf16"',
          'with nf.full_precision(model) if precision == "nvfp4"',
          "tests/training/test_post_training.py tests/evaluation"),
    Fault("core_not_centered", "nanochat_fp4/evaluation/core_metric.py",
          "(accuracy - chance) / (1 - chance)", "(accuracy - chance)",
          "tests/evaluation/test_core.py"),
]  # fmt: skip
FAULTS = [*NVFP4, *KERNELS, *MODELS, *TRAINING, *DATA, *OUTWARDS]


class Found(NamedTuple):
    """The test that finds a fault, or None, and what happened instead."""

    test: str | None
    note: str = ""


def place_of(tree: Path, fault: Fault) -> Path:
    """The file that holds the fault's text exactly once. Raises ValueError if there is none, or more than one."""
    usual = tree / fault.file
    if usual.is_file() and usual.read_text().count(fault.old) == 1:
        return usual
    files = [path for room in ROOMS for path in sorted((tree / room).rglob("*.py"))]
    holding = [path for path in files if path.read_text().count(fault.old)]
    if len(holding) != 1 or holding[0].read_text().count(fault.old) != 1:
        where = ", ".join(str(path.relative_to(tree)) for path in holding) or "no file"
        raise ValueError(f"{fault.name}: its text is in {where}, expected once; correct lab/faults.py")
    return holding[0]


def copy_of(checkout: Path, folder: Path) -> Path:
    """A copy of the checkout's tracked files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=checkout, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (checkout / name).is_file():  # deleted and not committed yet
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkout / name, folder / name)
    return folder


def first_failure(tree: Path, arguments: list[str]) -> Found:
    """pytest in this tree, up to the first failure."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    env = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'kernels'}"}
    run = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", run.stdout, re.MULTILINE)
    last = (run.stdout.strip().splitlines() or run.stderr.strip().splitlines() or [""])[-1]
    return Found(failed[0] if failed else None, last)


def find(checkout: Path, fault: Fault, all_tests: bool = False) -> Found:
    """Applies the fault to a copy of the checkout and runs the tests there, up to the first failure.

    A test that fails without the fault as well finds nothing, and is left out.
    """
    with tempfile.TemporaryDirectory(prefix="fault_") as folder:
        tree = copy_of(checkout, Path(folder))
        path = place_of(tree, fault)
        right = path.read_text()
        arguments = ["tests"] if all_tests else fault.tests.split()
        if gone := [test for test in arguments if not (tree / test).exists()]:
            return Found(None, f"{', '.join(gone)} is not there; correct lab/faults.py")
        while True:
            path.write_text(right.replace(fault.old, fault.new))
            found = first_failure(tree, arguments)
            path.write_text(right)
            if found.test is None or first_failure(tree, [found.test]).test is None:
                return found
            if "::" not in found.test:
                return Found(None, f"{found.test} cannot be collected without the fault either")
            arguments += ["--deselect", found.test]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this fault (may be repeated)")
    parser.add_argument("--all-tests", action="store_true", help="run the whole suite for each fault")
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    parser.add_argument("--checkout", default=str(Path(__file__).parents[1]), help="another checkout of this project")
    parser.add_argument("--json", help="file for the results, in which those of an earlier call are kept")
    args = parser.parse_args(argv)
    checkout, known = Path(args.checkout), {fault.name: fault for fault in FAULTS}
    if unknown := [name for name in args.only if name not in known]:
        parser.error(f"there is no fault {unknown[0]}; there are {', '.join(known)}")
    results = json.loads(Path(args.json).read_text()) if args.json and Path(args.json).exists() else {}
    missed = []
    for fault in (known[name] for name in args.only or known):
        try:
            if args.list:
                print(f"{fault.name:32s} {place_of(checkout, fault).relative_to(checkout)}")
                continue
            found = find(checkout, fault, args.all_tests)
        except ValueError as error:
            found = Found(None, str(error))
        print(f"{fault.name:32s} {found.test or 'NOT FOUND'}  ({found.note})", flush=True)
        results[fault.name] = found.test
        missed += [] if found.test else [fault.name]
        if args.json:
            Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    if missed:
        sys.exit(f"{len(missed)} faults are found by no test: {', '.join(missed)}")


if __name__ == "__main__":
    main()
