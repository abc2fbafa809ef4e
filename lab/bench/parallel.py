"""Measures the time and memory of whole training steps on several GPUs, with ddp or FSDP.

    torchrun --standalone --nproc_per_node=2 -m lab.bench parallel --depth 26 --parallel ddp
    torchrun --standalone --nproc_per_node=2 -m lab.bench parallel --depth 26 --parallel fsdp --gather codes

The model is nanochat's GPT with its optimizers, on random tokens. The first step warms up, and the memory of the second
one is read. Further steps run for --seconds, and their median time is taken. One row is appended to --json. These flags
suit a CPU:

    --depth 2 --aspect-ratio 64 --vocab-size 512 --seq-len 64 --micro-batch 2 --total-batch-size 512 --seconds 1
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import nanochat_fp4 as nf
from lab.bench.common import new_model
from nanochat_fp4.cli import ArgumentParser, UserError, parse_finite
from nanochat_fp4.common import add_recipes_argument, compute_cleanup, compute_init, is_ddp_initialized, print0
from nanochat_fp4.hardware import environment_info, peak_memory
from nanochat_fp4.models.gpt import compile_layers, config_from_depth
from nanochat_fp4.models.optim import PretrainingOptions
from nanochat_fp4.nvfp4.collectives import local
from nanochat_fp4.parallel import MODES, shard
from nanochat_fp4.training.memory import plan_accumulation
from nanochat_fp4.training.step import TrainingStep

GIB = 2**30


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description="Time and memory of training steps on several GPUs")
    add = parser.add_argument
    add("--depth", type=int, default=26)
    add_recipes_argument(parser)
    add("--method", default="clover", help="of nf.METHODS, lab/recipes.py or --recipes")
    add("--parallel", choices=MODES, default="ddp")
    add("--gather", choices=("codes", "bf16"), default="codes", help="what travels of a quantized weight (fsdp)")
    add("--micro-batch", type=int, default=8, help="rows")
    add("--total-batch-size", type=int, default=524288, help="tokens of a step")
    add("--seq-len", type=int, default=2048)
    add("--vocab-size", type=int, default=65536)
    add("--aspect-ratio", type=int, default=64, help="width = depth * aspect_ratio")
    add("--head-dim", type=int, default=128)
    add("--seconds", type=parse_finite, default=30.0, help="of timed steps; at least two are taken, at most 50")
    add("--compile", action=argparse.BooleanOptionalAction, default=None, help="(default: on a GPU only)")
    add("--json", default="", help="append the row to this file")
    args = parser.parse_args(argv)
    if args.gather == "bf16" and args.parallel != "fsdp":
        raise UserError("--gather=bf16 is for shards; add --parallel=fsdp, or leave it out")
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise UserError(f"--json={args.json}: its folder is not there; make it, or name another file")
    return args


def shard_weights(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Plain FSDP2, for comparison: all weights are gathered in dtype, and each process quantizes all of them."""
    mesh = dist.device_mesh.init_device_mesh(model.get_device().type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    how = {"mesh": mesh, "mp_policy": policy, "ignored_params": {p for p in model.parameters() if p.ndim < 2}}
    for block in model.transformer.h:
        fully_shard(block, **how)
    fully_shard(model.transformer.wte, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, **how)


def make_step(args: argparse.Namespace, device: torch.device, world_size: int) -> tuple[TrainingStep, str]:
    """Returns (the training step, the name of its kind of parallelism in the rows)."""
    if args.parallel == "fsdp" and world_size == 1:
        raise UserError("one process has nobody to share weights with; start several with torchrun, or use ddp")
    config = config_from_depth(args.depth, args.vocab_size, args.seq_len, args.head_dim, args.aspect_ratio)
    model = new_model(config, device)
    nf.convert(model, args.method, verbose=False)
    cuda, mode = device.type == "cuda", args.parallel
    if mode == "fsdp":
        layers = (shard if args.gather == "codes" else shard_weights)(model, torch.bfloat16 if cuda else None)
        mode = "fsdp_codes" if layers else "fsdp_bf16"  # With the method bf16 no layer is gathered as codes.
    forward = compile_layers(model) if (cuda if args.compile is None else args.compile) else model
    optimizers, schedule = model.setup_pretraining(PretrainingOptions(), args.total_batch_size, 1000)
    schedule(500, 0.5)
    return TrainingStep(model, optimizers, forward), mode


def state_bytes(step: TrainingStep) -> int:
    """Returns the bytes that this process holds of weights, their gradients, and the states of the optimizers."""
    weights = sum(2 * local(p).nbytes for p in step.model.parameters())
    states = (t for o in step.optimizers for s in o.state.values() for t in s.values())
    return weights + sum(t.nbytes for t in states if torch.is_tensor(t))


def measure(args: argparse.Namespace, device: torch.device, rank: int, world_size: int) -> dict[str, Any]:
    """Trains the steps and measures them. Returns the row of the results."""
    step, mode = make_step(args, device, world_size)
    of_batch = args.total_batch_size, args.micro_batch, args.seq_len, world_size
    micro_batches = plan_accumulation(*of_batch, flag="--micro-batch")
    tokens = torch.randint(args.vocab_size, (args.micro_batch, args.seq_len + 1), device=device)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    torch.manual_seed(rank)  # Processes that compute different rows have different rounding noise.

    def run(count: int = micro_batches) -> tuple[float, int, Any]:
        """Runs a step. Returns (seconds, bytes held between the last backward pass and the update, loss)."""
        step.synchronize()
        began = time.perf_counter()
        with step.micro_batches(count):
            for _ in range(count):
                loss = step.micro_batch(*batch, count=count)
        step.model.clip_gradients()
        held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        step.update()
        step.synchronize()
        return time.perf_counter() - began, held, loss

    run(min(2, micro_batches))  # This step compiles.
    seconds, held, _ = run()
    steps = torch.tensor(min(50, max(2, args.seconds / seconds)), device=device)
    if is_ddp_initialized():
        dist.all_reduce(steps, op=dist.ReduceOp.MIN)
    times, _, losses = zip(*[run() for _ in range(int(steps))])
    median = statistics.median(times)
    return {
        "depth": args.depth, "method": args.method, "mode": mode, "gpus": world_size,
        "micro_batch": args.micro_batch, "micro_batches": micro_batches, "tokens": args.total_batch_size,
        "tokens_per_second": args.total_batch_size / median, "seconds": median, "steps": len(times),
        "fastest": min(times), "slowest": max(times), "peak_gib": peak_memory(device) / GIB, "held_gib": held / GIB,
        "state_gib": state_bytes(step) / GIB, "loss": float(losses[-1]), "compiled": step.forward is not step.model,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    _, rank, _, world_size, device = compute_init("cuda" if torch.cuda.is_available() else "cpu")
    try:
        row = measure(args, device, rank, world_size)
    finally:
        compute_cleanup()
    if rank == 0 and args.json:
        info = environment_info()
        row["hardware"] = f"{world_size} x {info['gpu'] or info['cpu']}; torch {info['torch']}; {info['commit']}"
        with Path(args.json).open("a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")
    print0(
        f"d{row['depth']} {row['method']} {row['mode']} x {row['gpus']}: {row['tokens_per_second']:,.0f} tokens/s, "
        f"peak {row['peak_gib']:.1f} GiB, state {row['state_gib']:.1f} GiB"
    )
