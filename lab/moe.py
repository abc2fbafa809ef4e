"""A small model with experts trained in BF16 and in 4 bits: 8 experts, 2 for each token, on real text.

    python -m lab.moe tokens --data-dir FOLDER --out tokens.pt             a tokenizer of 4,096 tokens, and its tokens
    python -m lab.moe train --tokens tokens.pt --method clover --seed 1 --steps 1000 --out clover_1.json
    python -m lab.moe table *.json

The blocks are those of Llama, but for the MLP. The experts are stacked parameters, as transformers has them. Runs of
one seed begin with the same weights and read the same text. AdamW, the rate as in models/llama.py. Nothing is compiled.
"""

import itertools
import json
import math
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, silu

import nanochat_fp4 as nf
from nanochat_fp4.common import print0
from nanochat_fp4.console import ArgumentParser, table
from nanochat_fp4.errors import UserError, run_main
from nanochat_fp4.files import atomic_write
from nanochat_fp4.models.gpt import autocast
from nanochat_fp4.models.llama import Llama, LlamaConfig, lr_multiplier

EXPERTS, CHOICES, BALANCE = 8, 2, 0.01  # BALANCE: weight of the loss that spreads tokens over the experts
VOCABULARY, LENGTH, ROWS = 4096, 512, 16
LEARNING_RATE = 1e-3


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


def build(layers: int, width: int, hidden: int, device: torch.device) -> Llama:
    """A Llama whose MLPs are experts, with weights from torch's default generator."""
    with torch.device("meta"):
        model = Llama(LlamaConfig(LENGTH, VOCABULARY, layers, width // 64, width // 64, width))
        for block in model.transformer.h:
            block.mlp = MoE(width, hidden)
    model.to_empty(device=device).init_weights()
    return model


def make_tokens(data_dir: str, out: Path, tokens: int) -> None:
    """A file of {"train", "val": uint16 (T,), and "train_bytes", "val_bytes": their number of UTF-8 bytes}."""
    from nanochat_fp4.data.dataset import parquets_iter_batched  # training needs neither module, nor their packages
    from nanochat_fp4.data.tokenizer import RustBPETokenizer

    texts = {split: (text for batch in parquets_iter_batched(split, data_dir=data_dir) for text in batch)
             for split in ("train", "val")}  # fmt: skip
    some = list(itertools.islice(texts["train"], 2000))
    tokenizer = RustBPETokenizer.train_from_iterator(some, VOCABULARY)
    texts["train"], made = itertools.chain(some, texts["train"]), {}
    for split, count in (("train", tokens), ("val", 150_000)):
        ids, size = [], 0
        for text in texts[split]:
            ids += [tokenizer.get_bos_token_id(), *tokenizer.encode(text)]
            size += len(text.encode())
            if len(ids) >= count:
                break
        made |= {split: torch.tensor(ids, dtype=torch.uint16), f"{split}_bytes": size}
    torch.save(made, out)
    print0(f"{out}: {len(made['train']):,} tokens, {len(made['val']):,} of validation ({made['val_bytes']:,} bytes)")


@torch.no_grad()
def bits_per_byte(model: Llama, data: dict, rows: int) -> float:
    """Of the first rows of LENGTH tokens of the validation text."""
    model.eval()
    device, total = model.get_device(), 0.0
    ids = data["val"].int()[: rows * LENGTH + 1]
    for start in range(0, len(ids) - LENGTH, ROWS * LENGTH):
        x = ids[start : start + ROWS * LENGTH + 1].to(device)
        end = (len(x) - 1) // LENGTH * LENGTH
        x, y = x[:end].view(-1, LENGTH), x[1 : end + 1].long().view(-1, LENGTH)
        with autocast(device.type):
            total += float(model(x, y, loss_reduction="sum"))
    model.train()
    count = (len(ids) - 1) // LENGTH * LENGTH
    return total / math.log(2) / count * len(data["val"]) / data["val_bytes"]


def train(args) -> None:
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = torch.load(args.tokens, weights_only=True)
    model = build(args.layers, args.width, 2 * args.width, device)
    nf.convert(model, args.method, verbose=False)
    decayed, others = ([p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=LEARNING_RATE, betas=(0.9, 0.95), fused=device.type == "cuda",
    )  # fmt: skip
    text, order = data["train"].int().to(device), torch.Generator().manual_seed(args.seed)
    curve, times, start = {}, [], time.perf_counter()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * lr_multiplier(step, args.steps)
        places = torch.randint(len(text) - LENGTH, (args.rows, 1), generator=order) + torch.arange(LENGTH + 1)
        ids = text[places.to(device)].long()
        with autocast(device.type):
            loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
            balance = sum(block.mlp.balance for block in model.transformer.h)
        (loss + BALANCE * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % max(1, args.steps // 10) == 0:
            times.append(time.perf_counter() - start)
            curve[step + 1] = bits_per_byte(model, data, args.eval_rows)
            print0(f"{args.method} {args.seed} step {step + 1} bpb {curve[step + 1]:.4f} {times[-1]:.0f} s")
    own = bits_per_byte(model, data, 4 * args.eval_rows)
    with nf.full_precision(model):
        plain = bits_per_byte(model, data, 4 * args.eval_rows)
    half = times[-1] - times[len(times) // 2 - 1]
    result = {"method": args.method, "seed": args.seed, "steps": args.steps, "tokens": args.steps * args.rows * LENGTH,
              "curve": curve, "bpb": own, "bpb_bf16": plain, "seconds": times[-1], "seconds_of_second_half": half,
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
    tokens = commands.add_parser("tokens", help="makes the file of tokens")
    tokens.add_argument("--data-dir", required=True)
    tokens.add_argument("--count", type=int, default=7_200_000)
    run = commands.add_parser("train", help="trains one model")
    run.add_argument("--tokens", type=Path, required=True)
    run.add_argument("--method", default="clover")
    for name, default in (
        ("seed", 1),
        ("steps", 1000),
        ("layers", 4),
        ("width", 512),
        ("rows", ROWS),
        ("eval-rows", 64),
    ):
        run.add_argument(f"--{name}", type=int, default=default)
    for command in (tokens, run):
        command.add_argument("--out", type=Path, required=True)
    commands.add_parser("table", help="compares runs").add_argument("files", type=Path, nargs="+")
    args = parser.parse_args(argv)
    if args.command == "tokens":
        make_tokens(args.data_dir, args.out, args.count)
    elif args.command == "train":
        train(args)
    else:
        print0(report(args.files))


if __name__ == "__main__":
    run_main(main)
