"""Trains with FSDP2: convert, then fully_shard as usual, then gather_codes. FSDP sends weights in 4.5 bits per element.

torchrun --nproc_per_node=2 examples/fsdp2.py
"""

import os

try:
    import nanochat_fp4 as nf  # It comes first, so that another package that is missing is one line.
except ModuleNotFoundError as e:
    message = "error: nanochat_fp4 is not installed in this Python; type pip install -e . in its checkout first"
    raise (SystemExit(message) if e.name == "nanochat_fp4" else e) from None
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(method: str = "clover", steps: int = 20) -> list[float]:
    gpu = torch.cuda.is_available()
    mesh = dist.device_mesh.init_device_mesh("cuda" if gpu else "cpu", (dist.get_world_size(),))
    torch.manual_seed(0)  # All ranks begin with the same weights.
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
    model = nn.Sequential(nn.Embedding(50, 32), *blocks, nn.Linear(32, 50)).to("cuda" if gpu else "cpu")
    nf.convert(model, method, skip="3")  # "3" is the name of the output head.
    for block in model[1:3]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    nf.gather_codes(model)  # Without this call FSDP gathers weights in BF16 or FP32, and each rank quantizes them.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + dist.get_rank())  # Each rank has its own data and rounding noise.
    rows, losses = torch.randint(50, (8, 33), device=model[0].weight.device), []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    nf.cli.ArgumentParser(description=__doc__).parse_args()  # It takes no flags.
    if "RANK" not in os.environ:
        raise SystemExit(f"error: FSDP2 needs several processes; type torchrun --nproc_per_node=2 {__file__}")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    print(main())
    dist.destroy_process_group()
