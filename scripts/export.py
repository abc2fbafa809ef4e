"""
Writes a checkpoint in the formats of other programs. From the root of the repository:

    python -m scripts.export --source=sft --model-tag=d20_clover --format=compressed-tensors --out=exported

--format  safetensors         BF16 or FP32 weights for transformers, of any model
          compressed-tensors  NVFP4 or FP8 for transformers and vLLM, of any model (vLLM itself was not run)
          gguf                NVFP4 or Q8_0 for llama.cpp, of base_train --llama alone (needs the gguf package)
          gguf-bf16           BF16 for llama.cpp, of base_train --llama alone (needs the gguf package)

The quantized formats hold exactly the codes and scales that the trained forward pass multiplies, except for layers that
servers compute as one and the model does not (--no-share-scales keeps these, too), and for FP8 in GGUF. In
compressed-tensors 4-bit layers have input scales that are found on training text, and the inputs of FP8 layers have a
scale for each token. With --weights-only inputs stay in 16 bits. The bits per byte of each variant are measured on
validation text and written into the model card.

A program that has trained a model of transformers can call nf.save_quantized, which writes the same files.
"""

import argparse
import functools
import json
from pathlib import Path

import torch

import nanochat_fp4 as nf
from nanochat_fp4.cli import ArgumentParser, UserError, parse_count, parse_positive, require, run_main
from nanochat_fp4.common import joined_processes, print0
from nanochat_fp4.data import tokenizer_files
from nanochat_fp4.data.dataloader import Documents, packed_rows
from nanochat_fp4.data.dataset import Survey, open_text
from nanochat_fp4.data.tokenizer import get_token_bytes
from nanochat_fp4.evaluation.loss_eval import evaluate_bpb
from nanochat_fp4.evaluation.report import FOLDERS
from nanochat_fp4.export import gguf_file, huggingface
from nanochat_fp4.export.save import check_replaceable, model_card, new_export, reading_lines
from nanochat_fp4.export.weights import calibrate, check_values, forward_weights, in_eight_bits, served
from nanochat_fp4.files import atomic_write
from nanochat_fp4.hardware import environment_info
from nanochat_fp4.models.gpt import autocast
from nanochat_fp4.nvfp4.format import NVFP4Tensor
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.progress import Progress
from nanochat_fp4.training.checkpoint_manager import list_steps, read_meta
from nanochat_fp4.training.flags import add_model_arguments
from nanochat_fp4.training.load_model import checkpoint_folder, find_model_tag, load_for_inference
from scripts.base_train import text_name, text_of_base, text_to_measure

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
QUANTIZED = ("compressed-tensors", "gguf")
FORMATS = ("safetensors", *QUANTIZED, "gguf-bf16")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description="Export a checkpoint to the formats of other programs")
    add = parser.add_argument
    add("--source", default="sft", choices=tuple(FOLDERS), help="stage of the checkpoint")
    text = "kind of files; gguf: of base_train --llama alone; others: any model"
    add("--format", required=True, choices=FORMATS, help=text)
    add("--out", required=True, help="folder to write; it must not exist, or --overwrite")
    add("--overwrite", action="store_true", help="replace the folder if it is there")
    add("--dtype", default="bfloat16", choices=tuple(DTYPES), help="of the weights that are not quantized")
    add_model_arguments(parser)
    add("--weights-only", action="store_true", help="compressed-tensors with quantized weights and inputs in 16 bits")
    shared = "round layers that servers compute as one together, such as q, k and v; otherwise as in training"
    add("--share-scales", action=argparse.BooleanOptionalAction, default=True, help=shared)
    add("--data-dir", default=None, help="text to calibrate and to measure on (default: $DATA_DIR, else the run's)")
    text = "training tokens that give NVFP4's input scales"
    add("--calibration-tokens", type=parse_positive, default=32768, help=text)
    add("--eval-tokens", type=parse_count, default=65536, help="validation tokens for bits per byte; 0: none")
    add("--device-batch-size", type=parse_positive, default=4, help="rows of a batch")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    out = Path(args.out).expanduser().resolve()  # If --out is a link, the folder behind it is replaced.
    if args.format != "compressed-tensors" and args.weights_only:
        raise UserError(f"--weights-only is for compressed-tensors; --format={args.format} quantizes no inputs")
    if args.format.startswith("gguf"):
        if args.dtype != "bfloat16":
            raise UserError(f"--dtype={args.dtype} is not for GGUF, whose other weights are BF16; leave it out")
    else:
        require("safetensors", "tokenizers")
    check_replaceable(out, args.overwrite, "--overwrite")
    alone = joined_processes(args.device_type, alone="export")
    with alone as (_, _, device), torch.no_grad(), autocast(device.type), new_export(out, args.overwrite) as part:
        export = Export(args, device)
        export.write(part)
    size = sum(f.stat().st_size for f in out.iterdir())
    exported = f"{export.meta['model_tag']} (step {export.meta['step']})"
    print0(f"Exported {exported} as {args.format} to {out}: {size / 1e6:.1f} MB")


class Export:
    """The export of one checkpoint: the model, its quantized weights and input scales, and notes for the model card."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.args, self.device = args, device
        self.quantizes, self.gguf = args.format in QUANTIZED, args.format.startswith("gguf")
        if self.gguf:  # Before minutes of loading, and before a package is asked for.
            folder = checkpoint_folder(args.source, find_model_tag(args.source, args.model_tag))
            configs = [read_meta(folder, step).get("model_config") for step in list_steps(folder)]
            if not any(config.get("family") == "llama" for config in configs if config):
                problem = f"--format={args.format} is for the Llama of base_train --llama=30M, not for nanochat's GPT"
                raise UserError(f"{problem}; use --format=compressed-tensors or safetensors")
            require("gguf")
        self.model, self.tokenizer, self.meta, self.method = load_for_inference(args.source, device, args)
        if self.quantizes and not get_recipe(self.method).output.b.rounding:
            mend = "use --format=safetensors, or --method=clover (or another) to round its weights now"
            raise UserError(f"the method {self.method} has no quantized weights in its forward pass; {mend}")
        self.notes: list[str] = []
        self.kinds: list[str] = []  # NVFP4, FP8 or both
        self.weights: dict[str, NVFP4Tensor] = {}
        self.input_scales: dict[str, float] | None = None

    @functools.cached_property
    def text(self) -> tuple[Survey, str]:
        """The text, and a sentence if it is not the model's. It is chosen when the export first reads some."""
        return text_to_measure(self.meta["model_tag"], self.args.data_dir)

    def batches(self, split: str, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns batches of (inputs, targets) with about so many tokens, and at least one batch."""
        rows, length = self.args.device_batch_size, self.model.config.sequence_len
        source = Documents(self.tokenizer, length, open_text(split, self.text[0]))
        loader = packed_rows(source, rows, self.device)
        return [(x, y) for (x, y, _), _ in zip(loader, range(max(1, round(tokens / (rows * length)))))]

    def validation_texts(self) -> list[str]:
        """Returns the documents of a batch of validation text, one by one. The tokens that mark their beginnings are
        left out, because other tokenizers would read them as ordinary text."""
        rows, _ = self.batches("val", 1)[0]
        bos, texts = self.tokenizer.get_bos_token_id(), []
        for row in rows.tolist():
            starts = [i for i, token in enumerate(row) if token == bos] + [len(row)]
            texts += [self.tokenizer.decode(row[i + 1 : j]) for i, j in zip(starts, starts[1:])]
        return list(filter(None, texts))

    def write(self, target: Path) -> None:
        """Writes the files of the export into an empty folder."""
        dtype = torch.bfloat16 if self.gguf else DTYPES[self.args.dtype]
        check_values(self.model.state_dict(), dtype)
        if self.quantizes:
            print0(f"Quantizing the weights: {self.method}")
            self.weights, self.notes = forward_weights(self.model, self.args.share_scales)
            self.kinds = sorted({"FP8" if in_eight_bits(t) else "NVFP4" for t in self.weights.values()})
            left = [name for name, _ in self.model.nf_report.left_alone]
            more = " ..." if len(left) > 4 else ""
            self.notes.append(f"Not quantized: embedding, norms and {', '.join(left[:4])}{more}.")
            self.input_scales = None if self.args.weights_only or self.gguf else {}
            if self.input_scales is not None and "NVFP4" in self.kinds:
                text = self.batches("train", self.args.calibration_tokens)
                rows = Progress((x for x, _ in text), len(text), desc="calibration", unit="batch")
                self.input_scales = calibrate(self.model, self.weights, rows, self.args.share_scales)
        if self.gguf:
            self.say_what_llama_cpp_does()
        for note in self.notes:
            print0(note)
        measured, measured_on = self.measure()
        self.write_model(target)
        self.write_card(target, measured, measured_on)

    def say_what_llama_cpp_does(self) -> None:
        """Adds notes on what llama.cpp computes in another way."""
        if self.quantizes:
            self.notes.append("llama.cpp rounds inputs its own way, not as training did.")
        changed, total = gguf_file.other_ids(self.tokenizer, self.validation_texts())
        self.notes.append(
            f"llama.cpp splits text by {gguf_file.PRE_TOKENIZER!r}, for want of nanochat's pattern: on validation text "
            f"{changed:,} of {total:,} ids differ."
        )

    def measure(self) -> tuple[dict[str, float], str]:
        """Measures the bits per byte of the trained forward pass and of the forward passes that a server may compute
        with the export. Returns {forward pass: bits per byte}, and a sentence on how they were measured."""
        if not self.args.eval_tokens:
            return {}, ""
        batches = self.batches("val", self.args.eval_tokens)
        token_bytes = get_token_bytes(device=self.device)

        def bpb(model: torch.nn.Module, what: str) -> None:
            progress = Progress(total=len(batches), desc=f"bits per byte, {what}", unit="batch")
            with progress, nf.quantize_weights_once(model):
                measured[what] = evaluate_bpb(model, batches, len(batches), token_bytes, progress.update)
            print0(f"bits per byte, {what}: {measured[what]:.4f}")

        measured: dict[str, float] = {}
        precision = "BF16" if self.device.type == "cuda" else "FP32"
        bpb(self.model, f"trained: {self.method}")
        with nf.full_precision(self.model):
            bpb(self.model, f"{precision} weights and inputs")
        if self.weights:
            kinds = " and ".join(self.kinds)
            inputs = {f"{precision} inputs": None}
            if self.input_scales is not None:
                inputs[f"{kinds} inputs with a scale for each token"] = dict.fromkeys(self.weights)
            if self.input_scales:
                inputs[f"{kinds} inputs with static scales"] = self.input_scales
            logits = []
            for what, scales in inputs.items():
                with served(self.model, self.weights, scales) as copied:
                    bpb(copied, f"exported: {kinds} weights, {what}")
                    logits.append(copied(batches[0][0]).float())
                if scales is not None:
                    moved = float((logits.pop() - logits[0]).std() / logits[0].std())
                    self.notes.append(f"{kinds} weights, {what}: logits move by {moved:.3f} of their deviation.")
                    print0(self.notes[-1])
        info = environment_info()
        read = f"{sum(y.numel() for _, y in batches):,} validation tokens of {text_name(self.text[0].folder)}"
        return measured, f"Of {read}, on {info['gpu'] or info['cpu']}, torch {info['torch']}."

    def write_model(self, target: Path) -> None:
        """Writes the weights and the tokenizer in the chosen format."""
        chat = self.args.source != "base"
        if self.gguf:
            name = self.meta["model_tag"]
            self.notes += gguf_file.write(self.model, self.tokenizer, target, self.weights, chat, name)
            return
        ends = [self.tokenizer.encode_special(name) for name in tokenizer_files.end_tokens(self.tokenizer, chat)]
        ids = {"bos_token_id": self.tokenizer.get_bos_token_id(), "eos_token_id": ends, "pad_token_id": ends[0]}
        first, dtype = {**ids, "eos_token_id": ends[0]}, DTYPES[self.args.dtype]
        huggingface.write_own(self.model, target, dtype, self.weights, self.input_scales, first)
        self.write_tokenizer(target, ids, chat)

    def write_card(self, target: Path, measured: dict[str, float], measured_on: str) -> None:
        """Writes the model card, which shows how to load the export."""
        args, meta = self.args, self.meta
        user, config = meta.get("user_config", {}), meta["model_config"]
        later = args.source != "base"
        other = [f"{self.text[1]}."] if "text" in vars(self) and self.text[1] else []  # vars has it if text was read.
        kinds = ["Q8_0" if self.gguf and kind == "FP8" else kind for kind in self.kinds]
        bpb, trained = meta.get("val_bpb"), user.get("method") or "bf16"
        rows = {
            "stage": args.source,
            "steps": meta["step"],
            "QAT method trained with": trained,
            "forward pass exported": self.method if self.quantizes else f"not quantized, {args.dtype}",
            "data" + " of the base training" * later: text_name(text_of_base(meta["model_tag"])[0]),
            "tokens a step": user.get("total_batch_size"),
            "sequence length": config.get("sequence_len"),
            "parameters": f"{sum(p.numel() for p in self.model.parameters()):,}",
            "validation bits per byte, as training measured it" + " on conversations" * later: bpb and f"{bpb:.4f}",
        }
        use = [f"llama-cli -m {gguf_file.FILE_NAME}"] if self.gguf else reading_lines(target, later)
        title = f"{meta.get('model_tag') or 'model'}: a language model trained with {trained}"
        made = f"Trained with nanochat_fp4, exported as `{args.format}` in {', '.join([*kinds, args.dtype])}."
        card = model_card(title, made, ["nanochat", *kinds], rows, other + self.notes, use, measured, measured_on)
        atomic_write(target / "README.md", card)

    def write_tokenizer(self, target: Path, ids: dict[str, int], chat: bool) -> None:
        """Writes the tokenizer's files for transformers."""
        length = self.model.config.sequence_len
        files = {
            "generation_config.json": ids,
            "tokenizer.json": tokenizer_files.tokenizer_json(self.tokenizer),
            "tokenizer_config.json": tokenizer_files.tokenizer_config(self.tokenizer, chat, length),
        }
        for name, value in files.items():
            atomic_write(target / name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    run_main(main)
