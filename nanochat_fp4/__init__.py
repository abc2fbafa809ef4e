"""NVFP4 training for any PyTorch model, with all three GEMMs of its linear layers in 4 bits.

A model of your own takes one line, before torch.compile and before the optimizer:

    import nanochat_fp4 as nf
    model = nf.convert(model, method="clover")

The model keeps its Parameters, its names and its state dict. `print(model.nf_report)` names the layers that stay in
high precision. `print(nf.backend())` names the kernels of this machine. A Blackwell GPU multiplies 4-bit numbers. Other
GPUs and CPUs emulate the same arithmetic.

The other names, by task:

    train       convert. For methods that change in the course of a run: set_progress. For clover_feedback:
                update_gram_matrices, gram_state, load_gram_state
    go faster   quantize_weights_once and accumulate_gradients, around the micro-batches of a step
    evaluate    full_precision, for the same weights in BF16. per_token_scale, for results that do not depend on the
                other rows of a batch
    many GPUs   gather_codes with FSDP2. ColwiseParallel and RowwiseParallel with DTensor
    load, save  load_quantized, which reads a folder of scripts.export. save_quantized, which writes such a folder for a
                model of transformers
    numerics    quantize, rotate and NVFP4Tensor, which are the format. QuantLinear, which is one layer
    methods     METHODS, the names to choose from, and ROUNDINGS, which methods are made of. A row of
                ROUNDINGS is a Rounding. get_recipe, which returns
                the Recipe of a name, and register, which adds a row. A Recipe of your own has a Gemm of two Operands
                for each product:

    nf.convert(model, nf.Recipe("mine", output=nf.Gemm(nf.Operand("rtn"), nf.Operand("four_over_six"))))

Wrong input raises ValueError, with one line that says what was expected. The examples in the docstrings of these names
begin with `import torch, nanochat_fp4 as nf`. `nanochat-fp4 --help` lists the commands, and `nanochat-fp4 doctor`
checks that this machine computes what the paper says.
"""

from importlib import import_module

from nanochat_fp4 import cli  # noqa: F401  It comes first, for signals that arrive while torch is imported.

# isort: split
from nanochat_fp4.nvfp4 import methods
from nanochat_fp4.nvfp4.contexts import accumulate_gradients, full_precision, per_token_scale, quantize_weights_once
from nanochat_fp4.nvfp4.convert import convert
from nanochat_fp4.nvfp4.dispatch import backend
from nanochat_fp4.nvfp4.feedback import gram_state, load_gram_state
from nanochat_fp4.nvfp4.format import NVFP4Tensor
from nanochat_fp4.nvfp4.gram_matrices import update_gram_matrices
from nanochat_fp4.nvfp4.hadamard import rotate
from nanochat_fp4.nvfp4.linear import QuantLinear
from nanochat_fp4.nvfp4.methods import get_recipe, register
from nanochat_fp4.nvfp4.quantized_training import set_progress
from nanochat_fp4.nvfp4.quantizers import quantize
from nanochat_fp4.nvfp4.recipes import Gemm, Operand, Recipe
from nanochat_fp4.nvfp4.roundings import ROUNDINGS, Rounding

__version__ = "0.3.0"

METHODS = (*methods.METHODS, *methods.ALIASES)  # The names that --method and $QAT_METHOD accept.

__all__ = [
    "METHODS",
    "ROUNDINGS",
    "ColwiseParallel",
    "Gemm",
    "NVFP4Tensor",
    "Operand",
    "QuantLinear",
    "Recipe",
    "Rounding",
    "RowwiseParallel",
    "accumulate_gradients",
    "backend",
    "convert",
    "full_precision",
    "gather_codes",
    "get_recipe",
    "gram_state",
    "load_gram_state",
    "load_quantized",
    "per_token_scale",
    "quantize",
    "quantize_weights_once",
    "register",
    "rotate",
    "save_quantized",
    "set_progress",
    "update_gram_matrices",
]

# Few programs need these names, so their modules are imported when a name is first used. __init__.pyi has all names for
# type checkers.
_ON_DEMAND = {
    "ColwiseParallel": "nvfp4.tensor_parallel",
    "RowwiseParallel": "nvfp4.tensor_parallel",
    "gather_codes": "nvfp4.sharding",
    "load_quantized": "export.load",
    "save_quantized": "export.save",
}


def __getattr__(name: str):
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ON_DEMAND[name]}"), name)


def __dir__() -> list[str]:
    return __all__
