"""What 4 bits cost a finished model, and what gets the accuracy back: one table.

    python -m lab.measure.accuracy --model HuggingFaceTB/SmolLM2-135M --out smollm2.json
    python -m lab.measure.accuracy --model $NANOCHAT_BASE_DIR/base_checkpoints/d4 --out d4.json

--model is a folder of checkpoints (its tokenizer is the base directory's), a folder of transformers or a name on the
hub. Rows that --out holds are not made again. All rows read the same held-out text.

    bf16      the model in full precision. On a CPU that is FP32
    tuned     bf16, trained as long as the rows below: what the training text alone brings
    ptq       4/6 for the weights, nothing is trained
    feedback  the same after calibration: error feedback (GPTQ), with a search over six block scales
    qat       trained in 4 bits on the text
"""

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanochat_fp4 as nf
from lab.measure.bench_common import some_of
from nanochat_fp4.common import autodetect_device_type, print0
from nanochat_fp4.console import ArgumentParser, parse_finite
from nanochat_fp4.data.dataloader import Text, tokenizing_distributed_data_loader_bos_bestfit
from nanochat_fp4.data.dataset import ensure_data
from nanochat_fp4.devices import peak_memory
from nanochat_fp4.environment import environment_info
from nanochat_fp4.errors import UserError, run_main
from nanochat_fp4.files import atomic_write
from nanochat_fp4.models.gpt import autocast
from nanochat_fp4.models.hf_model import load_hf_model
from nanochat_fp4.training.checkpoint_manager import list_steps
from nanochat_fp4.training.load_model import build_model

ROWS = ("bf16", "tuned", "ptq", "feedback", "qat")
INPUTS = {"W4A4": nf.Operand("four_over_six"), "W4A16": nf.Operand()}
PLAIN, FEEDBACK = nf.Operand("four_over_six"), nf.Operand("scale_search_6", feedback=True)
CALIBRATION = 4  # batches, for the Gram matrices


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description="What 4 bits cost a finished model, and what gets the accuracy back")
    add = parser.add_argument
    add("--model", required=True, help="folder of checkpoints, folder of transformers, or hub name")
    add("--out", type=Path, required=True, help="JSON file of the results")
    add("--rows", default=",".join(ROWS), help=f"some of {','.join(ROWS)}")
    add("--data-dir", default=None, help="text, as DATA_DIR")
    add("--steps", type=int, default=100, help="of each training")
    add("--lr", type=parse_finite, default=5e-6, help="AdamW's largest; it falls to zero")
    add("--device-batch-size", type=int, default=4, help="rows of a batch")
    add("--seq-len", type=int, default=512, help="tokens of a row")
    add("--eval-batches", type=int, default=8, help="of held-out text; their logits are kept, 4 bytes each")
    add("--device-type", default="", help="cuda|cpu|mps (empty = autodetect)")
    return parser.parse_args(argv)


def load(name: str, device: torch.device) -> tuple[nn.Module, Any, Tensor]:
    """(model, tokenizer, bytes of each token). Raises UserError."""
    path = Path(name)
    if path.is_dir() and list_steps(path):
        model, tokenizer, _ = build_model(path, None, device, "eval")
        return model, tokenizer, tokenizer.token_bytes().to(device)
    model, tokenizer = load_hf_model(name, device)
    return model, tokenizer, tokenizer.token_bytes(device)


class Study:
    """The model, its text, and bf16's logits on the held-out part of the text."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.args, self.device = args, device
        self.model, self.tokenizer, self.token_bytes = load(args.model, device)
        self.data_dir = ensure_data(args.data_dir)
        self.held_out = [batch for _, batch in zip(range(args.eval_batches), self.batches("val"))]
        with torch.no_grad(), autocast(device.type):
            self.wanted = [self.model(x).log_softmax(-1) for x, _ in self.held_out]

    def batches(self, split: str) -> Iterator[tuple[Tensor, Tensor]]:
        rows, length = self.args.device_batch_size, self.args.seq_len
        make = tokenizing_distributed_data_loader_bos_bestfit
        return make(self.tokenizer, rows, length, split, device=self.device, text=Text(self.data_dir))

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, float]:
        """Bits per byte, KL divergence from bf16 in nats a token, and the share of tokens with bf16's first choice."""
        sums = torch.zeros(4, dtype=torch.float64)
        with autocast(self.device.type):
            for (x, y), wanted in zip(self.held_out, self.wanted):
                found = model(x).log_softmax(-1)
                lengths = torch.where(y >= 0, self.token_bytes[y.clamp_min(0)], 0)
                nats = -found.gather(-1, y.clamp_min(0).unsqueeze(-1)).squeeze(-1)
                kl = F.kl_div(found, wanted, log_target=True, reduction="none").sum(-1)
                same = (found.argmax(-1) == wanted.argmax(-1)).float()
                of_batch = (nats * (lengths > 0)).sum(), lengths.sum(), kl.mean(), same.mean()
                sums += torch.stack(of_batch).double().cpu()
        bits = sums[0] / sums[1] / torch.log(torch.tensor(2.0))
        return {"bpb": float(bits), "kl": float(sums[2]) / len(self.wanted), "top1": float(sums[3]) / len(self.wanted)}

    def converted(self, inputs: str, weight: nf.Operand = PLAIN) -> nn.Module:
        """A copy in 4 bits whose backward pass is not quantized."""
        recipe = nf.Recipe(f"{inputs} {weight}", output=nf.Gemm(INPUTS[inputs], weight))
        return nf.convert(copy.deepcopy(self.model), recipe, per_token_in_eval=False, verbose=False)

    def train(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], rate: float = 1.0) -> None:
        model.train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate * self.args.lr)
        steps, warm_up = self.args.steps, max(1, self.args.steps // 10)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / warm_up) * (1 - step / steps)
        )
        for _, (x, y) in zip(range(steps), self.batches("train")):
            with autocast(self.device.type):
                value = loss(x, y)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        model.eval()

    def make(self, row: str, inputs: str) -> tuple[nn.Module, dict[str, float]]:
        """(the row's model, further numbers)."""
        if row in ("bf16", "tuned"):
            model = copy.deepcopy(self.model)
            if row == "tuned":
                self.train(model, model)
            return model, {}
        model = self.converted(inputs, FEEDBACK if row == "feedback" else PLAIN)
        if row == "feedback":
            look = [x for _, (x, _) in zip(range(CALIBRATION), self.batches("train"))]
            with autocast(self.device.type), torch.no_grad():
                nf.update_gram_matrices(model, lambda: [model(x) for x in look])
        elif row == "qat":
            self.train(model, model)
        return model, {}


def run(study: Study, row: str, inputs: str) -> dict[str, Any]:
    """One line of the table. The memory is the peak of making the row, the model in full precision included."""
    if study.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")  # Linux: VmHWM begins again
    start = time.perf_counter()
    model, numbers = study.make(row, inputs)
    seconds = time.perf_counter() - start
    memory = peak_memory(study.device)
    status = Path("/proc/self/status")
    if study.device.type != "cuda" and status.exists():
        memory = next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if "VmHWM" in line)
    with nf.quantize_weights_once(model):
        numbers |= study.measure(model)
    return {"row": row, "inputs": inputs, **numbers, "minutes": seconds / 60, "memory_gib": memory / 2**30}


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    rows = some_of("--rows", args.rows, ROWS)
    setup = {k: v for k, v in vars(args).items() if k not in ("out", "rows")} | {"model": Path(args.model).name}
    record = json.loads(args.out.read_text()) if args.out.exists() else {"setup": setup, "lines": []}
    if record["setup"] != setup:
        raise UserError(f"{args.out} has results of other settings ({record['setup']}); choose another --out")
    study = Study(args, torch.device(args.device_type or autodetect_device_type()))
    done = {(line["row"], line["inputs"]) for line in record["lines"]}
    for row in sorted(rows, key=ROWS.index):
        for inputs in ("-",) if row in ("bf16", "tuned") else INPUTS:
            if (row, inputs) not in done:
                torch.manual_seed(0)
                record["lines"].append(run(study, row, inputs))
                record["environment"] = environment_info()
                atomic_write(args.out, json.dumps(record, indent=1) + "\n")
                print0(record["lines"][-1])
    keys = ("bpb", "kl", "top1", "minutes", "memory_gib")
    print0("| row | inputs | bits per byte | KL to BF16, nats | same first token | minutes | memory, GiB |")
    print0("|---|---|---:|---:|---:|---:|---:|")
    for n in sorted(record["lines"], key=lambda n: ROWS.index(n["row"])):
        print0(f"| {n['row']} | {n['inputs']} | {' | '.join(f'{n[k]:.4f}' if k in n else '-' for k in keys)} |")


if __name__ == "__main__":
    run_main(main)
