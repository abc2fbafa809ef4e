"""nanochat trained fully in NVFP4: the public API of the numerics."""

from nanochat_fp4 import signals  # noqa: F401  first, for the signals that come while torch is imported

# isort: split
from nanochat_fp4.nvfp4 import methods
from nanochat_fp4.nvfp4.contexts import accumulate_gradients, full_precision, per_token_scale, quantize_weights_once
from nanochat_fp4.nvfp4.convert import convert
from nanochat_fp4.nvfp4.dispatch import backend
from nanochat_fp4.nvfp4.feedback import gram_state, load_gram_state
from nanochat_fp4.nvfp4.format import NVFP4Tensor
from nanochat_fp4.nvfp4.hadamard import rotate
from nanochat_fp4.nvfp4.linear import QuantLinear
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.quantizers import ROUNDINGS, quantize
from nanochat_fp4.nvfp4.recipes import Gemm, Operand, Recipe
from nanochat_fp4.nvfp4.sharding import gather_codes
from nanochat_fp4.nvfp4.training import set_progress, update_gram_matrices

__version__ = "0.2.0"

METHODS = (*methods.METHODS, *methods.ALIASES)  # the names to choose QAT_METHOD from
ABLATIONS = tuple(methods.ABLATIONS)  # other values of QAT_METHOD: the paper's figures, other systems, parts of methods

__all__ = [
    "ABLATIONS",
    "METHODS",
    "ROUNDINGS",
    "ColwiseParallel",
    "Gemm",
    "NVFP4Tensor",
    "Operand",
    "QuantLinear",
    "Recipe",
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
    "rotate",
    "save_quantized",
    "set_progress",
    "update_gram_matrices",
]


def __getattr__(name: str):
    # Few programs need these names, and their modules import more than torch's core, so they are loaded on demand.
    if name == "load_quantized":
        from nanochat_fp4.export.load import load_quantized

        return load_quantized
    if name == "save_quantized":
        from nanochat_fp4.export.save import save_quantized

        return save_quantized
    if name in ("ColwiseParallel", "RowwiseParallel"):
        from nanochat_fp4.nvfp4 import tensor_parallel

        return getattr(tensor_parallel, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
