# The types of all public names, whose modules __init__.py imports when a name is first used.

from nanochat_fp4.export.load import load_quantized
from nanochat_fp4.export.save import save_quantized
from nanochat_fp4.nvfp4.contexts import accumulate_gradients, full_precision, per_token_scale, quantize_weights_once
from nanochat_fp4.nvfp4.convert import convert
from nanochat_fp4.nvfp4.dispatch import backend
from nanochat_fp4.nvfp4.format import NVFP4Tensor
from nanochat_fp4.nvfp4.hadamard import rotate
from nanochat_fp4.nvfp4.layer import QuantLinear
from nanochat_fp4.nvfp4.methods import get_recipe, register
from nanochat_fp4.nvfp4.phases import set_progress
from nanochat_fp4.nvfp4.quantizers import quantize
from nanochat_fp4.nvfp4.recipes import Gemm, Operand, Recipe
from nanochat_fp4.nvfp4.roundings import ROUNDINGS, Rounding
from nanochat_fp4.nvfp4.sharding import gather_codes
from nanochat_fp4.nvfp4.tensor_parallel import ColwiseParallel, RowwiseParallel

__version__: str
METHODS: tuple[str, ...]

__all__ = [
    "ColwiseParallel",
    "Gemm",
    "METHODS",
    "NVFP4Tensor",
    "Operand",
    "QuantLinear",
    "ROUNDINGS",
    "Recipe",
    "Rounding",
    "RowwiseParallel",
    "accumulate_gradients",
    "backend",
    "convert",
    "full_precision",
    "gather_codes",
    "get_recipe",
    "load_quantized",
    "per_token_scale",
    "quantize",
    "quantize_weights_once",
    "register",
    "rotate",
    "save_quantized",
    "set_progress",
]
