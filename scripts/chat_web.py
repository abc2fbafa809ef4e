"""
Talk to a chat model in the browser.

    python -m scripts.chat_web                     then open http://127.0.0.1:8000/
    python -m scripts.chat_web --source mid --port 8080

One process and one model; several conversations are answered side by side in one batch. The server is bound to this
machine alone unless --host says otherwise; it knows no users, so put it behind something that does before you do that.
"""

import argparse
import contextlib

import torch

import nanochat_fp4 as nf
from nanochat_fp4.common import autodetect_device_type, compute_cleanup, compute_init, print0
from nanochat_fp4.console import ArgumentParser, parse_finite
from nanochat_fp4.errors import UserError, require, run_main
from nanochat_fp4.generation.batching import Batcher
from nanochat_fp4.generation.decoding import compute_dtype, prepare
from nanochat_fp4.generation.engine import Engine
from nanochat_fp4.models.gpt import autocast
from nanochat_fp4.training.stage import checkpoint_method, load_stage_model


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description="Serve the model with a chat page")
    add = parser.add_argument
    add("-i", "--source", default="sft", choices=("mid", "sft", "rl"), help="Source of the model: sft|mid|rl")
    add("-g", "--model-tag", default=None, help="Model tag to load")
    add("-s", "--step", type=int, default=None, help="Step to load")
    add("-t", "--temperature", type=parse_finite, default=0.8, help="Default temperature for generation")
    add("-k", "--top-k", type=int, default=50, help="Default top-k sampling parameter")
    add("-m", "--max-tokens", type=int, default=512, help="Default max tokens of an answer")
    add("-p", "--port", type=int, default=8000, help="Port to run the server on")
    add("--host", default="127.0.0.1", help="Host to bind the server to (default: this machine alone)")
    add("--allow-host", action="append", default=[], help="a further name by which browsers may call this server")
    add("--max-batch", type=int, default=8, help="conversations answered at the same time")
    add("--max-waiting", type=int, default=32, help="further requests that may wait")
    add("--rate", type=int, default=60, help="requests a minute from one address (0: no limit)")
    add("--device-type", default="", choices=("", "cuda", "cpu", "mps"), help="cuda|cpu|mps. empty => autodetect")
    add("-d", "--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    add("--method", default=None, help="QAT method of the forward pass (default: the one the model was trained with)")
    add(
        "--precision",
        default="both",
        choices=("both", "nvfp4", "bf16"),
        help="what a conversation can choose; nvfp4 alone keeps the weights as 4-bit codes alone",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if min(args.max_batch, args.max_tokens) < 1 or min(args.max_waiting, args.rate, args.top_k) < 0:
        raise UserError("--max-batch and --max-tokens are at least 1; --max-waiting, --rate and --top-k at least 0")
    if not 0 <= args.temperature <= 2 or args.top_k > 200 or args.max_tokens > 4096:
        raise UserError("--temperature is from 0 to 2, --top-k at most 200, --max-tokens at most 4096")
    if not 1 <= args.port <= 65535:
        raise UserError(f"--port={args.port} is no port; use one from 1 to 65535")
    require("fastapi", "uvicorn")
    import uvicorn

    from nanochat_fp4.generation.chat_server import Limits, create_app

    _, _, _, world_size, device = compute_init(args.device_type or autodetect_device_type())
    try:
        if world_size > 1:
            raise UserError("chat_web is one process; start it without torchrun")
        batcher, info = load(args, device)
        hosts = ["*"] if args.host in ("0.0.0.0", "::") and not args.allow_host else [
            "localhost", "127.0.0.1", "[::1]", args.host, *args.allow_host
        ]  # fmt: skip
        defaults = {"temperature": args.temperature, "top_k": args.top_k, "max_tokens": args.max_tokens}
        app = create_app(
            batcher, info | {"defaults": defaults}, defaults=defaults, hosts=hosts, limits=Limits(per_minute=args.rate)
        )
        print0(f"{info['model']}, {info['method']}: open http://{args.host}:{args.port}/ (Ctrl-C ends)")
        try:
            uvicorn.run(app, host=args.host, port=args.port, log_level="warning", timeout_graceful_shutdown=2)
        except SystemExit as e:
            if e.code != 3:  # what uvicorn exits with where it cannot start
                raise
            raise UserError(
                f"cannot listen at {args.host}:{args.port}; choose another --port, or a --host of this machine"
            ) from None
        finally:
            batcher.close()
    finally:
        compute_cleanup()


def load(args: argparse.Namespace, device: torch.device) -> tuple[Batcher, dict]:
    """A Batcher with the model, which computes with its method's forward or in BF16; and what the page says of it."""
    model, tokenizer, meta = load_stage_model(args.source, device, "eval", args.model_tag, args.step)
    method = checkpoint_method(meta, args.method)
    if method == "bf16" and args.precision == "nvfp4":
        raise UserError("--precision=nvfp4: the model was trained in bf16; choose how to round it, --method=clover say")
    nf.convert(model, method, backward=False, verbose=False)
    dtype = compute_dtype(device, args.dtype)
    if method == "bf16":
        args.precision = "bf16"

    @contextlib.contextmanager
    def forward(quantized: bool):
        with contextlib.ExitStack() as stack:
            if not quantized:
                stack.enter_context(nf.full_precision(model))
            stack.enter_context(nf.per_token_scale(model))
            stack.enter_context(autocast(device.type, dtype))
            yield

    contexts = {"nvfp4": lambda: forward(True), "bf16": lambda: forward(False)}
    precisions = {"nvfp4": f"NVFP4 ({method})", "bf16": "BF16"}
    if args.precision != "both":
        contexts, precisions = ({args.precision: d[args.precision]} for d in (contexts, precisions))
    with forward("nvfp4" in contexts):
        prepare(model, dtype, both=args.precision == "both")
    info = {
        "model": f"{args.source} {meta.get('model_tag') or args.model_tag or ''}".strip() + f", step {meta['step']}",
        "method": method,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precisions": precisions,
    }
    return Batcher(Engine(model, tokenizer), args.max_batch, args.max_waiting, contexts), info


if __name__ == "__main__":
    run_main(main)
