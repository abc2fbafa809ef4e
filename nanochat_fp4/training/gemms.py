"""The run's choice of FP4 GEMMs: rank 0 makes it for all, from the products of the model's own micro-batch."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nanochat_fp4.common import is_ddp_initialized, print0
from nanochat_fp4.errors import UserError, one_line
from nanochat_fp4.nvfp4 import dispatch
from nanochat_fp4.nvfp4.gemm_choice import Choice, Product, choose
from nanochat_fp4.training.micro_batch import try_micro_batch


def products_of(model: nn.Module, rows: int, seq_len: int, dtype: torch.dtype | None) -> Counter[Product]:
    """The products of a micro-batch that FP4 tensor cores could make -> how often.

    Passes of one and of two rows are recorded, which need little memory. What differs between them is the tokens.
    """
    passes = []
    for size in (1, 2):
        with dispatch.recorded_products() as products, torch.compiler.set_stance("force_eager"):
            try_micro_batch(model, size, seq_len, dtype)
        passes.append(products)
    model.zero_grad(set_to_none=True)
    if len(passes[0]) != len(passes[1]):  # the tokens decide what is computed
        return Counter()
    sizes = [[a + (rows - 1) * (b - a) for a, b in zip(one[:3], two[:3])] for one, two in zip(*passes)]
    return Counter(Product(*mnk, str(one[3]).removeprefix("torch.")) for mnk, one in zip(sizes, passes[0]))


def choose_gemms(
    model: nn.Module, rows: int, seq_len: int, dtype: torch.dtype | None, stored: dict[str, Any] | None
) -> Choice | None:
    """Chooses, prints the table, and has all processes use the choice. None where FP4 tensor cores make nothing.

    stored: Choice.record of the run that goes on. All processes call this together. Raises UserError where NVFP4_GEMM
    asks for what is wrong here.
    """
    dispatch.use_choice({})
    box: list[Any] = [None]
    try:
        if dispatch.native_gemm(model.get_device().type) is None:
            return None
        products = products_of(model, rows, seq_len, dtype)
        if products and not (is_ddp_initialized() and dist.get_rank()):
            box = [choose(products, torch.cuda.get_device_name(), stored)]
    except ValueError as error:
        box = [one_line(error)]
    if is_ddp_initialized():
        dist.broadcast_object_list(box, src=0)
    choice = box[0]
    if isinstance(choice, str):
        raise UserError(choice)
    if choice is not None:
        dispatch.use_choice({(*p[:3], p.out_dtype): name for p, name in choice.taken.items()})
        print0("\n".join(choice.lines()))
    return choice
