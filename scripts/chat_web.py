"""
Serves a page on which users talk to a chat model in the browser.

    python -m scripts.chat_web                     then open http://127.0.0.1:8000/
    python -m scripts.chat_web --source mid --port 8080

The program is one process with one model, which writes one answer at a time. Visitors wait in a line, and the page
shows their place in it. The server can be reached from this machine alone, unless --host says otherwise. It does not
authenticate users. Put it behind a server that does before you open it to others.
"""

import argparse
import contextlib
from typing import Any

import torch

import nanochat_fp4 as nf
from nanochat_fp4.cli import ArgumentParser, UserError, parse_finite, require, run_main
from nanochat_fp4.common import joined_processes, print0
from nanochat_fp4.generation.chat import compute_dtype, prepare
from nanochat_fp4.generation.engine import Engine
from nanochat_fp4.models.gpt import autocast
from nanochat_fp4.training.flags import add_model_arguments
from nanochat_fp4.training.load_model import load_for_inference, warn_of_few_tokens


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description="Serve the model with a chat page")
    add = parser.add_argument
    add("-i", "--source", default="sft", choices=("mid", "sft", "rl"), help="Source of the model: sft|mid|rl")
    add("-t", "--temperature", type=parse_finite, default=0.8, help="Default temperature for generation")
    add("-k", "--top-k", type=int, default=50, help="Default top-k sampling parameter")
    add("-m", "--max-tokens", type=int, default=512, help="Default max tokens of an answer")
    add("-p", "--port", type=int, default=8000, help="Port to run the server on")
    add("--host", default="127.0.0.1", help="Host to bind the server to (default: this machine alone)")
    add("--allow-host", action="append", default=[], help="a further name by which browsers may call this server")
    add("--max-waiting", type=int, default=32, help="requests that may wait while one is answered")
    add("--rate", type=int, default=60, help="requests a minute from one address (0: no limit)")
    add("-d", "--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    add_model_arguments(parser, "both", "nvfp4", "bf16")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.max_tokens < 1 or min(args.max_waiting, args.rate, args.top_k) < 0:
        raise UserError("--max-tokens is at least 1; --max-waiting, --rate and --top-k are at least 0")
    if not 0 <= args.temperature <= 2 or args.top_k > 200 or args.max_tokens > 4096:
        raise UserError("--temperature is from 0 to 2, --top-k at most 200, --max-tokens at most 4096")
    if not 1 <= args.port <= 65535:
        raise UserError(f"--port={args.port} is no port; use one from 1 to 65535")
    require("fastapi", "uvicorn")
    from nanochat_fp4.generation.chat_server import Limits, create_app, log_briefly, make_server

    with joined_processes(args.device_type, alone="chat_web") as (_, _, device):
        worker, info = load(args, device)
        codes = (
            nf.quantize_weights_once(worker.engine.model) if "nvfp4" in worker.contexts else contextlib.nullcontext()
        )
        hosts = ["localhost", "127.0.0.1", "[::1]", args.host, *args.allow_host]
        if args.host in ("0.0.0.0", "::") and not args.allow_host:
            hosts = ["*"]
            print0(
                f"--host={args.host}: any host name is accepted, also one of a foreign page (DNS rebinding); "
                "--allow-host=NAME accepts that name alone"
            )
        defaults = {"temperature": args.temperature, "top_k": args.top_k, "max_tokens": args.max_tokens}
        limits = Limits(per_minute=args.rate)
        app = create_app(worker, info | {"defaults": defaults}, defaults=defaults, hosts=hosts, limits=limits)
        print0(f"{info['model']}, {info['method']}: open http://{args.host}:{args.port}/ (Ctrl-C ends)")
        log_briefly()
        server = make_server(app, args.host, args.port, limits)
        try:
            with codes, contextlib.suppress(KeyboardInterrupt):
                server.run()
        except SystemExit:  # uvicorn raises this if it cannot start.
            if server.started:
                raise
            raise UserError(
                f"cannot listen at {args.host}:{args.port}; choose another --port, or a --host of this machine"
            ) from None
        finally:
            worker.thread.shutdown(cancel_futures=True)


def load(args: argparse.Namespace, device: torch.device) -> tuple[Any, dict]:
    """Loads the model. Returns a Worker that can use its method's own forward pass, BF16 or both (--precision), and the
    description of the model that the page shows."""
    from nanochat_fp4.generation.chat_server import Worker

    model, tokenizer, meta, method = load_for_inference(args.source, device, args)
    warn_of_few_tokens(model, meta)
    if method == "bf16" and args.precision == "nvfp4":
        raise UserError("--precision=nvfp4: the model was trained in bf16; choose how to round it, --method=clover say")
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
        prepare(model, dtype)
    info = {
        "model": f"{args.source} {meta.model_tag}".strip() + f", step {meta.step}",
        "method": method,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precisions": precisions,
    }
    return Worker(Engine(model, tokenizer), args.max_waiting, contexts), info


if __name__ == "__main__":
    run_main(main)
