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
import logging
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch

import nanochat_fp4 as nf
from nanochat_fp4.cli import ArgumentParser, UserError, logger, number_type, parse_count, require, run_main
from nanochat_fp4.common import joined_processes, print0
from nanochat_fp4.evaluation.metrics import few_tokens
from nanochat_fp4.generation.chat import compute_dtype, prepare
from nanochat_fp4.generation.engine import Engine
from nanochat_fp4.models.gpt import autocast
from nanochat_fp4.training.flags import add_model_arguments
from nanochat_fp4.training.load_model import load_for_inference, tokens_read


def _from(low: int, high: int, kind: type = int) -> Callable[[str], Any]:
    return number_type(kind, lambda value: low <= value <= high, f"a number from {low} to {high}")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description="Serve the model with a chat page")
    add = parser.add_argument
    add("-i", "--source", default="sft", choices=("mid", "sft", "rl"), help="Source of the model: sft|mid|rl")
    add("-t", "--temperature", type=_from(0, 2, float), default=0.8, help="Default temperature for generation")
    add("-k", "--top-k", type=_from(0, 200), default=50, help="Default top-k sampling parameter")
    add("-m", "--max-tokens", type=_from(1, 4096), default=512, help="Default max tokens of an answer")
    add("-p", "--port", type=_from(1, 65535), default=8000, help="Port to run the server on")
    add("--host", default="127.0.0.1", help="Host to bind the server to (default: this machine alone)")
    add("--allow-host", action="append", default=[], help="a further name by which browsers may call this server")
    add("--max-waiting", type=parse_count, default=32, help="requests that may wait while one is answered")
    add("--rate", type=parse_count, default=60, help="requests a minute from one address (0: no limit)")
    add("-d", "--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    add_model_arguments(parser, "both", "nvfp4", "bf16")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    require("fastapi", "uvicorn")
    from nanochat_fp4.generation.chat_server import Limits, create_app, make_server

    with joined_processes(args.device_type, alone="chat_web") as (_, _, device):
        worker, info = load(args, device)
        quantizes = "nvfp4" in worker.contexts
        codes = nf.quantize_weights_once(worker.engine.model) if quantizes else contextlib.nullcontext()
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
        for name in ("uvicorn.error", "asyncio"):  # one line for each of their errors, as for ours
            logging.getLogger(name).handlers, logging.getLogger(name).propagate = logger.handlers, False
        server = make_server(app, args.host, args.port, limits)
        try:
            family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
            try:
                listener = socket.create_server((args.host, args.port), family=family)  # before the page is offered
            except OSError as e:
                problem = f"cannot listen at {args.host}:{args.port} ({e.strerror.partition(' (')[0]})"
                raise UserError(f"{problem}; choose another --port, or a --host of this machine") from e
            print0(f"{info['model']}, {info['method']}: open http://{args.host}:{args.port}/ (Ctrl-C ends)")
            with codes, contextlib.suppress(KeyboardInterrupt):
                server.run([listener])
        finally:
            worker.thread.shutdown(cancel_futures=True)


def load(args: argparse.Namespace, device: torch.device) -> tuple[Any, dict]:
    """Loads the model. Returns a Worker that can use its method's own forward pass, BF16 or both (--precision), and the
    description of the model that the page shows."""
    from nanochat_fp4.generation.chat_server import Worker

    model, tokenizer, meta, method = load_for_inference(args.source, device, args)
    note = few_tokens(tokens_read(meta), model.num_scaling_params()) or ""
    if note:
        print(f"note: {note}", file=sys.stderr, flush=True)
    if method == "bf16" and args.precision == "nvfp4":
        raise UserError("--precision=nvfp4: the model was trained in bf16; choose how to round it, --method=clover say")
    dtype = compute_dtype(device, args.dtype)
    if method == "bf16":
        args.precision = "bf16"

    @contextlib.contextmanager
    def forward(quantized: bool):
        precision = contextlib.nullcontext() if quantized else nf.full_precision(model)
        with precision, nf.per_token_scale(model), autocast(device.type, dtype):
            yield

    contexts = {"nvfp4": lambda: forward(True), "bf16": lambda: forward(False)}
    output = nf.get_recipe(method).final.output
    kinds = {"FP8" if r.fp8 else r.function or "NVFP4" for r in (output.a.rounding, output.b.rounding) if r}
    exact = "BF16" if dtype == torch.bfloat16 else "FP32"
    precisions = {"nvfp4": f"{' and '.join(sorted(kinds)) or exact} ({method})", "bf16": exact}
    if args.precision != "both":
        contexts, precisions = ({args.precision: d[args.precision]} for d in (contexts, precisions))
    with forward("nvfp4" in contexts):
        prepare(model, dtype)
    info = {
        "model": f"{args.source} {meta['model_tag']}".strip() + f", step {meta['step']}",
        "method": method,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precisions": precisions,
        "note": note,
    }
    return Worker(Engine(model, tokenizer), args.max_waiting, contexts), info


if __name__ == "__main__":
    run_main(main)
