"""NVFP4 training for any PyTorch model, with all three GEMMs of its linear layers in 4 bits.

A model of your own takes one line, before torch.compile and before the optimizer:

    import nanochat_fp4 as nf
    model = nf.convert(model, method="clover")

The model keeps its Parameters, its names and its state dict. `print(model.nf_report)` names the layers that stay in
high precision. `print(nf.backend())` names the kernels of this machine. A Blackwell GPU multiplies 4-bit numbers. Other
GPUs and CPUs emulate the same arithmetic.

The other names, by task:

    train       convert. For methods that change in the course of a run: set_progress
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

__version__ = "0.3.0"

# The modules are imported when a name is first used, so that a command's --help needs no torch. __init__.pyi has all
# names for type checkers.
_MODULES = {
    "export.load": "load_quantized",
    "export.save": "save_quantized",
    "nvfp4.contexts": "accumulate_gradients full_precision per_token_scale quantize_weights_once",
    "nvfp4.convert": "convert",
    "nvfp4.dispatch": "backend",
    "nvfp4.format": "NVFP4Tensor",
    "nvfp4.hadamard": "rotate",
    "nvfp4.layer": "QuantLinear",
    "nvfp4.methods": "METHODS get_recipe register",
    "nvfp4.phases": "set_progress",
    "nvfp4.quantizers": "quantize",
    "nvfp4.recipes": "Gemm Operand Recipe",
    "nvfp4.roundings": "ROUNDINGS Rounding",
    "nvfp4.sharding": "gather_codes",
    "nvfp4.tensor_parallel": "ColwiseParallel RowwiseParallel",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULE_OF[name]}")
    value = (*module.METHODS, *module.ALIASES) if name == "METHODS" else getattr(module, name)
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return __all__
