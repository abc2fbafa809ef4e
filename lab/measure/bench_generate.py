"""
Generation in BF16 and with weights kept as codes: memory of the weights, tokens per second.

    python -m lab.measure.bench_generate                          # d26, BF16 and clover, 1 and 32 rows; needs a GPU
    python -m lab.measure.bench_generate --depth 20 --methods bf16,nvidia --batch 8

The model has random weights, and 128 tokens are in the cache. For each method and each number of rows:

    graph      tokens/s of decoding.Decoder, one graph replay a token; median of blocks of 8 tokens
    engine     tokens/s of Engine.generate, which samples as well
    eager      tokens/s of model(ids, kv_cache=...) token by token, without a graph
    agrees     |difference|^2 / |logits|^2 between the first and the last way
"""

import statistics
import time
from types import SimpleNamespace

import torch

import nanochat_fp4 as nf
from lab.measure import bench_common as common
from nanochat_fp4.errors import run_main
from nanochat_fp4.generation.decoding import Decoder, prepare
from nanochat_fp4.generation.engine import Engine
from nanochat_fp4.models.gpt import GPT, autocast, config_from_depth
from nanochat_fp4.nvfp4.linear import QuantLinear

VOCAB_SIZE, PROMPT, AGREE_STEPS, EAGER_STEPS = 65536, 128, 8, 24
BLOCK = 8  # tokens that are timed together
COLUMNS = {"method": ("method", ""), "rows": ("rows", "{}"), "weights MiB": ("mib", "{:,.0f}")}
COLUMNS |= {way: (way, "{:,.0f}") for way in ("graph", "engine", "eager")} | {"agrees": ("agrees", "{:.1e}")}


def weight_bytes(model: torch.nn.Module) -> int:
    """Memory of the model's parameters and of the codes that it computes with."""
    operands = {id(o): o for m in model.modules() if isinstance(m, QuantLinear)
                for o in (*m.packed.values(), *m.context.weights.values())}  # fmt: skip
    parameters = sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta)
    return parameters + sum(t.numel() * t.element_size() for o in operands.values() for t in o.tensors())


def build(depth: int, method: str, device: torch.device) -> GPT:
    """The model, ready to generate."""
    torch.manual_seed(0)
    model = common.new_model(config_from_depth(depth, VOCAB_SIZE), device)
    with torch.no_grad():
        for block in model.transformer.h:  # zero at the beginning of a training
            for linear in (block.attn.c_proj, block.mlp.c_proj):
                linear.weight.normal_(std=model.config.n_embd**-0.5)
        model.lm_head.weight.mul_(50)
    nf.convert(model, method, backward=False, verbose=False)
    return prepare(model.eval(), torch.bfloat16)


def seconds(function) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.inference_mode()
def measure(model: GPT, rows: int, tokens: int) -> dict:
    tokenizer = SimpleNamespace(encode_special=lambda text: -1, get_bos_token_id=lambda: -1)  # no token ends an answer
    engine = Engine(model, tokenizer)
    ids = torch.randint(0, VOCAB_SIZE, (rows, PROMPT), device=model.get_device())
    caches = [engine.new_cache(rows, PROMPT + tokens + 2) for _ in range(2)]
    for cache in caches:
        model(ids, kv_cache=cache)
    decoder, column = Decoder(model, caches[0]), ids[:, -1].clone()

    def eager(column: torch.Tensor) -> torch.Tensor:
        return model(column.unsqueeze(1), kv_cache=caches[1])[:, -1]

    error = total = 0.0
    for _ in range(AGREE_STEPS):
        got, want = decoder(column), eager(column)
        error, total = error + float((got - want).square().sum()), total + float(want.square().sum())
        column = want.argmax(-1)

    def steps(function, count: int) -> None:
        for _ in range(count):
            column.copy_(function(column).argmax(-1))

    def generate(max_tokens: int) -> None:
        for _ in engine.generate(ids[0].tolist(), rows, max_tokens=max_tokens, temperature=0):
            pass

    count = tokens - AGREE_STEPS
    blocks = [seconds(lambda: steps(decoder, BLOCK)) / BLOCK for _ in range(count // BLOCK)]
    few = min(count, EAGER_STEPS)
    generate(4)  # compiles the kernels of another shape
    return {
        "graph": rows / statistics.median(blocks),
        "engine": rows * tokens / seconds(lambda: generate(tokens)),
        "eager": rows * few / seconds(lambda: steps(eager, few)),
        "agrees": error / total,
    }


def main(argv: list[str] | None = None) -> None:
    parser = common.argument_parser(__doc__, roofline=False)
    parser.add_argument("--depth", type=int, default=26)
    parser.add_argument("--methods", default="bf16,clover")
    parser.add_argument("--batch", default="1,32", help="numbers of rows")
    parser.add_argument("--tokens", type=int, default=256, help="tokens to time")
    args = parser.parse_args(argv)
    device = common.need_cuda("bench_generate")
    results = common.Results("bench_generate", args.json, vars(args))
    for method in args.methods.split(","):
        model = build(args.depth, method, device)
        with autocast("cuda"), nf.per_token_scale(model):
            for rows in map(int, args.batch.split(",")):
                record = {"method": method, "rows": rows, "mib": weight_bytes(model) / 2**20}
                results.records.append(record | measure(model, rows, args.tokens))
                print(common.show(results.records[-1:], COLUMNS), flush=True)
        del model
    print(common.show(results.records, COLUMNS))
    results.finish()


if __name__ == "__main__":
    run_main(main)
