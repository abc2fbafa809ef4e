# The types of all public names. __init__.py imports some of them at once, and the others when they are asked for.

from nanochat_fp4.export.load import load_quantized as load_quantized
from nanochat_fp4.export.save import save_quantized as save_quantized
from nanochat_fp4.nvfp4.contexts import accumulate_gradients as accumulate_gradients
from nanochat_fp4.nvfp4.contexts import full_precision as full_precision
from nanochat_fp4.nvfp4.contexts import per_token_scale as per_token_scale
from nanochat_fp4.nvfp4.contexts import quantize_weights_once as quantize_weights_once
from nanochat_fp4.nvfp4.convert import convert as convert
from nanochat_fp4.nvfp4.dispatch import backend as backend
from nanochat_fp4.nvfp4.feedback import gram_state as gram_state
from nanochat_fp4.nvfp4.feedback import load_gram_state as load_gram_state
from nanochat_fp4.nvfp4.format import NVFP4Tensor as NVFP4Tensor
from nanochat_fp4.nvfp4.gram_matrices import update_gram_matrices as update_gram_matrices
from nanochat_fp4.nvfp4.hadamard import rotate as rotate
from nanochat_fp4.nvfp4.linear import QuantLinear as QuantLinear
from nanochat_fp4.nvfp4.methods import get_recipe as get_recipe
from nanochat_fp4.nvfp4.methods import register as register
from nanochat_fp4.nvfp4.quantized_training import set_progress as set_progress
from nanochat_fp4.nvfp4.quantizers import quantize as quantize
from nanochat_fp4.nvfp4.recipes import Gemm as Gemm
from nanochat_fp4.nvfp4.recipes import Operand as Operand
from nanochat_fp4.nvfp4.recipes import Recipe as Recipe
from nanochat_fp4.nvfp4.roundings import ROUNDINGS as ROUNDINGS
from nanochat_fp4.nvfp4.sharding import gather_codes as gather_codes
from nanochat_fp4.nvfp4.tensor_parallel import ColwiseParallel as ColwiseParallel
from nanochat_fp4.nvfp4.tensor_parallel import RowwiseParallel as RowwiseParallel

__version__: str
METHODS: tuple[str, ...]
