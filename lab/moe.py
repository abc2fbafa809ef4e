"""A small model with experts trained in BF16 and in 4 bits: 8 experts, 2 for each token, on real text.

    python -m lab.moe train --method clover --seed 1 --steps 1000 --out clover_1.json
    python -m lab.moe table *.json

The blocks are those of Llama, but for the MLP. The experts are stacked parameters, as transformers has them. Runs of
one seed begin with the same weights. All runs read the same text, by the base directory's tokenizer. Optimizer and
schedule are Llama's. Nothing is compiled.
"""

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, silu

import nanochat_fp4 as nf
from nanochat_fp4.common import autodetect_device_type, print0
from nanochat_fp4.console import ArgumentParser, table
from nanochat_fp4.data.dataloader import tokenizing_distributed_data_loader_bos_bestfit
from nanochat_fp4.data.dataset import ensure_data
from nanochat_fp4.data.tokenizer import get_token_bytes, get_tokenizer
from nanochat_fp4.errors import UserError, run_main
from nanochat_fp4.evaluation.loss_eval import evaluate_bpb
from nanochat_fp4.files import atomic_write
from nanochat_fp4.models.gpt import autocast
from nanochat_fp4.models.llama import Llama, LlamaConfig, lr_multiplier
from nanochat_fp4.models.optim import set_learning_rates

EXPERTS, CHOICES, BALANCE = 8, 2, 0.01  # BALANCE: weight of the loss that spreads tokens over the experts
LENGTH, LEARNING_RATE = 512, 1e-3


class Experts(nn.Module):
    """Weights and arguments as in transformers 5: gate and up are one weight, (experts, 2 hidden, width)."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * hidden, width))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, width, hidden))

    def act_fn(self, x: Tensor) -> Tensor:
        return silu(x)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y = torch.zeros_like(hidden_states)
        for e in range(EXPERTS):
            token, choice = (top_k_index == e).nonzero(as_tuple=True)
            gate, up = (hidden_states[token] @ self.gate_up_proj[e].T).chunk(2, dim=-1)
            part = (self.act_fn(gate) * up) @ self.down_proj[e].T * top_k_weights[token, choice, None]
            y = y.index_add(0, token, part.to(y.dtype))
        return y


class MoE(nn.Module):
    """x (B, T, width) -> (B, T, width). `balance` is the last pass's loss of balance, ()."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.router, self.experts = nn.Linear(width, EXPERTS, bias=False), Experts(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        chances = self.router(rows).float().softmax(-1)
        weights, chosen = chances.topk(CHOICES)
        share = one_hot(chosen.flatten(), EXPERTS).float().mean(0)
        self.balance = EXPERTS * (share * chances.mean(0)).sum()
        return self.experts(rows, chosen, weights / weights.sum(-1, keepdim=True)).view_as(x)


def build(layers: int, width: int, hidden: int, vocabulary: int, device: torch.device) -> Llama:
    """A Llama whose MLPs are experts, with weights from torch's default generator."""
    with torch.device("meta"):
        model = Llama(LlamaConfig(LENGTH, vocabulary, layers, width // 64, width // 64, width))
        for block in model.transformer.h:
            block.mlp = MoE(width, hidden)
    model.to_empty(device=device).init_weights()
    return model


def train(args) -> None:
    torch.manual_seed(args.seed)
    device, tokenizer = torch.device(autodetect_device_type()), get_tokenizer()
    data_dir, token_bytes = ensure_data(args.data_dir), get_token_bytes(device)

    def batches(split: str) -> Iterator[tuple[Tensor, Tensor]]:
        make = tokenizing_distributed_data_loader_bos_bestfit
        return make(tokenizer, args.rows, LENGTH, split, device=device, data_dir=data_dir)

    def bits_per_byte() -> float:
        model.eval()
        with autocast(device.type), nf.quantize_weights_once(model):
            bpb = evaluate_bpb(model, batches("val"), args.eval_batches, token_bytes)
        model.train()
        return bpb

    model = build(args.layers, args.width, 2 * args.width, tokenizer.get_vocab_size(), device)
    nf.convert(model, args.method, verbose=False)
    optimizers = model.setup_optimizers(LEARNING_RATE)
    curve, start = {}, time.perf_counter()
    for step, (x, y) in zip(range(args.steps), batches("train")):
        set_learning_rates(optimizers, lr_multiplier(step, args.steps))
        with autocast(device.type):
            loss = model(x, y)
            balance = sum(block.mlp.balance for block in model.transformer.h)
        (loss + BALANCE * balance).backward()
        model.clip_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % max(1, args.steps // 10) == 0:
            curve[step + 1] = bits_per_byte()
            print0(f"{args.method} {args.seed} step {step + 1} bpb {curve[step + 1]:.4f}")
    seconds = time.perf_counter() - start
    own = bits_per_byte()
    with nf.full_precision(model):
        plain = bits_per_byte()
    result = {"method": args.method, "seed": args.seed, "steps": args.steps, "tokens": args.steps * args.rows * LENGTH,
              "curve": curve, "bpb": own, "bpb_bf16": plain, "seconds": seconds,
              "parameters": sum(p.numel() for p in model.parameters()), "torch": torch.__version__}  # fmt: skip
    atomic_write(args.out, json.dumps(result, indent=1) + "\n")


def report(files: list[Path]) -> str:
    """The curves' means over the seeds, and the last values with each method's own forward and in BF16."""
    runs: dict[str, list[dict]] = {}
    for path in files:
        run = json.loads(path.read_text())
        runs.setdefault(run["method"], []).append(run)
    if not runs or len({tuple(run["curve"]) for some in runs.values() for run in some}) != 1:
        raise UserError(
            "the runs have other steps, or there are none; name runs of lab.moe train with the same --steps"
        )
    steps = list(next(iter(runs.values()))[0]["curve"])
    rows = [[f"step {s}", *(f"{statistics.fmean(r['curve'][s] for r in some):.4f}" for some in runs.values())]
            for s in steps]  # fmt: skip
    for key, name in (("bpb", "own forward"), ("bpb_bf16", "BF16 forward")):
        values = [[run[key] for run in some] for some in runs.values()]
        rows.append([name, *(f"{statistics.fmean(v):.4f} +- {statistics.pstdev(v):.4f}" for v in values)])
    rows.append(["runs", *(str(len(some)) for some in runs.values())])
    return table(["bits per byte", *runs], rows)


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description="Trains a small model with experts in BF16 and in 4 bits")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("train", help="trains one model")
    run.add_argument("--data-dir", default=None, help="text, as DATA_DIR")
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--method", default="clover")
    sizes = {"seed": 1, "steps": 1000, "layers": 4, "width": 512, "rows": 16, "eval-batches": 4}
    for name, default in sizes.items():
        run.add_argument(f"--{name}", type=int, default=default)
    commands.add_parser("table", help="compares runs").add_argument("files", type=Path, nargs="+")
    args = parser.parse_args(argv)
    if args.command == "train":
        train(args)
    else:
        print0(report(args.files))


if __name__ == "__main__":
    run_main(main)
