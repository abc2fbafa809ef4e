"""Counts the tensors that a block of the model keeps for its backward pass, in bytes per token, with BF16 and a method.

    python -m lab.bench memory                             # d26, clover; takes a minute on a laptop and needs no GPU
    python -m lab.bench memory --depth 20 --methods clover,nvidia

Autograd's hooks for saved tensors count each storage once, under the line of gpt.py that keeps it first. Parameters are
left out, and so are tensors whose size does not depend on the number of tokens (codes of weights, rotary tables). The
residual stream and products are BF16, as on CUDA. torch.compile makes its own choice of the tensors that are kept and
computed again, so a GPU may differ. lab.bench steps measures what a GPU really keeps.
"""

import itertools
import linecache
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

import nanochat_fp4 as nf
from lab.bench import common
from nanochat_fp4.models import gpt
from nanochat_fp4.models import recompute as from_codes
from nanochat_fp4.models.gpt import RECOMPUTE

# Parts of the lines of gpt.py and recompute.py that keep tensors -> the names of these tensors.
NAMES = {
    "= resid_lambda * x": "residual stream, for the gradient of resid_lambda",
    "MixedNorm.apply": "residual stream, for the gradient of resid_lambda",
    "checkpoint(attention": "residual stream into attention, to start again from",
    "self.attn(norm(x)": "residual stream into the norm before attention",
    "fused_linear(x": "input of c_q, c_k, c_v",
    "keep_output=True": "queries and keys",
    "flash_attention.attend": "values, result and log-sum-exp of attention",
    "after=attention": "input of c_q, c_k, c_v, and result and log-sum-exp of attention",
    "after=_ResidualNorm": "input of attention's c_proj",
    "self.c_proj(y": "input of attention's c_proj",
    "checkpoint(mlp": "residual stream into the MLP, to start again from",
    "self.mlp(norm(x)": "residual stream into the norm before the MLP",
    "self.c_fc(x)": "input of c_fc",
    "ReluSquared.apply": "for the derivative of ReLU^2",
    "self.c_proj(x": "input of the MLP's c_proj",
    "relu_squared_linear(x": "inputs of c_fc and the MLP's c_proj, and for the derivative of ReLU^2",
}


def _line() -> str:
    """Returns the line of gpt.py or recompute.py that is being executed."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename in (gpt.__file__, from_codes.__file__):
            return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        frame = frame.f_back
    return "outside of gpt.py"


def kept_bytes(model: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> dict[str, int]:
    """Returns the bytes that autograd keeps of forward() for the backward pass: {line of gpt.py: bytes}."""
    # Storages are told apart by _cdata, because fake ones have no address.
    kept = {p.untyped_storage()._cdata: p.untyped_storage() for p in model.parameters()}
    lines: dict[str, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in kept:
            kept[storage._cdata] = storage
            line = _line()
            lines[line] = lines.get(line, 0) + storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward()
    return lines


def per_token_and_layer(
    config: gpt.GPTConfig, method: str, recompute: str, tokens: int = 32
) -> tuple[dict[str, float], float]:
    """Returns ({line: bytes per token of one block}, bytes per token of everything outside of the blocks).

    Under FakeTensorMode nothing is computed, and the bytes are the same.
    """

    def kept(layers: int, rows: int) -> dict[str, int]:
        with torch.random.fork_rng(devices=[]):
            model = gpt.GPT(replace(config, n_layer=layers, sequence_len=tokens, window_pattern="L"))
            model.init_weights()
            wte = model.transformer.wte
            wte.weight = torch.nn.Parameter(wte.weight.detach().bfloat16())  # It is BF16 on CUDA.
            nf.convert(model, method, verbose=False)
            model.recompute = recompute
            ids = torch.zeros(rows, tokens, dtype=torch.int64)
            with gpt.autocast("cpu", torch.bfloat16):
                return kept_bytes(model, lambda: model(ids, ids))

    def slope(layers: int) -> dict[str, float]:
        one, two = kept(layers, 1), kept(layers, 2)
        return {line: (two[line] - one.get(line, 0)) / tokens for line in two}

    one, two = slope(1), slope(2)
    block = {line: two[line] - one.get(line, 0.0) for line in two}
    return {line: n for line, n in block.items() if n}, sum(one.values()) - sum(block.values())


def account(config: gpt.GPTConfig, methods: list[str]) -> list[dict]:
    """Returns a record for each method and kind of recomputation: the bytes per token of a block by tensor, their sum,
    and the bytes per token outside of the blocks.

    methods: "bf16" must be the first. Its block without recomputation is the unit of the ratios.
    """
    records = []
    for method, recompute in itertools.product(methods, RECOMPUTE):
        lines, rest = per_token_and_layer(config, method, recompute)
        tensors: dict[str, float] = {}
        for line, n in lines.items():
            name = next((name for part, name in NAMES.items() if part in line), line)
            tensors[name] = tensors.get(name, 0.0) + n
        record = {"method": method, "recompute": recompute, "width": config.n_embd, "tensors": tensors}
        records.append(record | {"block": sum(tensors.values()), "rest": rest})
    return [r | {"ratio": r["block"] / records[0]["block"]} for r in records]


def label(record: dict) -> str:
    """Returns the name of a record in the table."""
    return record["method"] + ("" if record["recompute"] == "none" else f", {record['recompute']}")


def show(records: list[dict]) -> str:
    """Returns the records as a Markdown table."""
    names = list(dict.fromkeys([*NAMES.values(), *(n for r in records for n in r["tensors"])]))
    rows = [(name, [r["tensors"].get(name) for r in records]) for name in names]
    rows = [(name, ["-" if n is None else f"{n:,.0f}" for n in cells]) for name, cells in rows if any(cells)]
    rows += [
        ("**a block**", [f"**{r['block']:,.0f}**" for r in records]),
        ("in units of the width", [f"{r['block'] / r['width']:.2f}" for r in records]),
        ("**ratio to BF16**", [f"**{r['ratio']:.2f}**" for r in records]),
        ("outside of the blocks", [f"{r['rest']:,.0f}" for r in records]),
    ]
    lines = ["| bytes per token and block | " + " | ".join(map(label, records)) + " |"]
    lines += ["|---|" + "---:|" * len(records), *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows)]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser, known = common.argument_parser(__doc__), "of nf.METHODS or lab/recipes.py, with commas"
    parser.add_argument("--depth", type=int, default=26, help="nanochat's dial; it sets the width")
    parser.add_argument("--methods", default="clover", help=f"{known}; bf16 is always there")
    args = parser.parse_args(argv)
    methods, config = common.methods_of(args.methods), gpt.config_from_depth(args.depth, vocab_size=512)
    records = account(config, methods)
    print(show(records))
    settings = {"depth": args.depth, "width": config.n_embd, "methods": methods[1:]}
    common.Results("bench_memory", args.json, settings, records=records).finish()
