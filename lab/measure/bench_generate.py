"""
Generation in BF16 and with weights kept as codes: memory of the weights, tokens per second.

    python -m lab.measure.bench_generate                          # d26, BF16 and clover, 1 and 32 rows; needs a GPU
    python -m lab.measure.bench_generate --depth 20 --methods bf16,nvidia --batch 8

The model has random weights. For each method: bytes of the weights, as counted and as CUDA's allocator has them; then,
for each number of rows, one graph replay a token (decoding.Decoder; median and best of 8 tokens each), the same through
Engine.generate with its sampling, and model(ids, kv_cache=...) token by token, without a graph. `agrees` compares the
logits of the first and the last way over some steps, as |difference|^2 / |logits|^2.
"""

import argparse
import gc
import statistics
import time
from types import SimpleNamespace

import torch

import nanochat_fp4 as nf
from lab.measure import bench_common as common
from nanochat_fp4.console import ArgumentParser
from nanochat_fp4.errors import UserError, run_main
from nanochat_fp4.generation.decoding import Decoder, prepare, weight_bytes
from nanochat_fp4.generation.engine import Engine
from nanochat_fp4.models.gpt import GPT, autocast, config_from_depth

AGREE_STEPS = 8
BLOCK = 8  # tokens that are timed together; the median of these is reported, and the best


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--depth", type=int, default=26)
    parser.add_argument("--vocab-size", type=int, default=65536)
    parser.add_argument("--methods", default="bf16,clover")
    parser.add_argument("--batch", default="1,32", help="numbers of rows")
    parser.add_argument("--prompt", type=int, default=128, help="tokens in the cache at the beginning")
    parser.add_argument("--tokens", type=int, default=256, help="tokens to time")
    parser.add_argument("--json", default="", help="where to write the numbers")
    return parser.parse_args(argv)


class Tokenizer(SimpleNamespace):
    """As much of one as Engine asks for; nothing ends an answer."""

    def encode_special(self, text: str) -> int:
        return -1

    def get_bos_token_id(self) -> int:
        return -1


def build(depth: int, vocab_size: int, method: str, device: torch.device) -> tuple[GPT, int]:
    """The model, ready to generate, and what CUDA's allocator has of it."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(config_from_depth(depth, vocab_size))
    model.to_empty(device=device)
    model.init_weights()
    with torch.no_grad():
        for block in model.transformer.h:  # zero at the beginning of a training
            for linear in (block.attn.c_proj, block.mlp.c_proj):
                linear.weight.normal_(std=model.config.n_embd**-0.5)
        model.lm_head.weight.mul_(50)
    nf.convert(model, method, backward=False, verbose=False)
    prepare(model.eval(), torch.bfloat16)
    gc.collect()
    torch.cuda.empty_cache()
    return model, torch.cuda.memory_allocated() - before


def seconds(function) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.inference_mode()
def measure(model: GPT, rows: int, args: argparse.Namespace) -> dict:
    device = model.get_device()
    engine = Engine(model, Tokenizer())
    ids = torch.randint(0, args.vocab_size, (rows, args.prompt), device=device)
    length = args.prompt + args.tokens + 2
    caches = [engine.new_cache(rows, length) for _ in range(2)]
    for cache in caches:
        model(ids, kv_cache=cache)
    decoder = Decoder(model, caches[0])
    error = total = 0.0
    same = 0
    column = ids[:, -1]
    for _ in range(AGREE_STEPS):
        got, want = decoder(column), model(column.unsqueeze(1), kv_cache=caches[1])[:, -1]
        error, total = error + float((got - want).square().sum()), total + float(want.square().sum())
        same += int((got.argmax(-1) == want.argmax(-1)).sum())
        column = want.argmax(-1)

    def steps(function, count: int) -> None:
        for _ in range(count):
            column.copy_(function(column).argmax(-1))

    def eager(column: torch.Tensor) -> torch.Tensor:
        return model(column.unsqueeze(1), kv_cache=caches[1])[:, -1]

    count = args.tokens - AGREE_STEPS
    blocks = [seconds(lambda: steps(decoder, BLOCK)) / BLOCK for _ in range(count // BLOCK)]
    few = min(count, 24)
    slow = rows * few / seconds(lambda: steps(eager, few))
    prompt = ids[0].tolist()
    for _ in engine.generate(prompt, rows, max_tokens=4, temperature=0):  # compiles what is new to it
        pass
    through = seconds(lambda: [None for _ in engine.generate(prompt, rows, max_tokens=args.tokens, temperature=0)])
    return {
        "rows": rows,
        "graph": rows / statistics.median(blocks),
        "best": rows / min(blocks),
        "engine": rows * args.tokens / through,
        "eager": slow,
        "relative_square_error": error / total,
        "same_greedy": same / (rows * AGREE_STEPS),
    }


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if not torch.cuda.is_available():
        raise UserError("bench_generate measures CUDA kernels and graphs, and there is no CUDA device")
    device = torch.device("cuda")
    records, base = [], None
    for method in args.methods.split(","):
        model, allocated = build(args.depth, args.vocab_size, method, device)
        bytes_ = weight_bytes(model)
        base = base or bytes_
        print(f"{method}: weights {bytes_ / 2**20:,.0f} MiB ({bytes_ / base:.3f}x), allocated {allocated / 2**20:,.0f}")
        with autocast("cuda"), nf.per_token_scale(model):
            for rows in map(int, args.batch.split(",")):
                record = {"method": method, "bytes": bytes_, "allocated": allocated, **measure(model, rows, args)}
                records.append(record)
                print(
                    "  " + ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items())
                )
        del model
    first = {r["rows"]: r["graph"] for r in records if r["method"] == records[0]["method"]}
    rows = [
        [r["method"], f"{r['bytes'] / 2**20:,.0f}", f"{r['bytes'] / base:.3f}", r["rows"], f"{r['graph']:,.0f}",
         f"{r['graph'] / first[r['rows']]:.2f}", f"{r['best']:,.0f}", f"{r['engine']:,.0f}", f"{r['eager']:,.0f}",
         f"{r['relative_square_error']:.1e}", f"{r['same_greedy']:.0%}"]
        for r in records
    ]  # fmt: skip
    head = [
        "method",
        "weights MiB",
        "of first",
        "rows",
        "tokens/s",
        "of first",
        "best",
        "Engine",
        "eager",
        "agrees",
        "greedy",
    ]
    print(common.table(head, rows))
    print(common.write_json("bench_generate", args.json, vars(args), records))


if __name__ == "__main__":
    run_main(main)
