"""Reads an export with other packages, and compares the result with the model's codes, scales, logits and ids."""

import importlib.metadata
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from nanochat_fp4.cli import UserError, require
from nanochat_fp4.data.tokenizer import RustBPETokenizer
from nanochat_fp4.export import gguf_file
from nanochat_fp4.export.huggingface import MODELING_FILE, WEIGHTS_FILE, Description
from nanochat_fp4.export.weights import Weights
from nanochat_fp4.nvfp4.format import NVFP4Tensor, decode_e2m1, unpack

# The largest difference of decoded values in FP32. They differ because the packages divide by 1 / tensor_scale.
MAX_ULPS = 2


def needs(*packages: str) -> list[str]:
    """Returns "name version" for each package, by the name of its distribution. Raises UserError if one is missing."""
    require(*(p.replace("-", "_") for p in packages))
    return [f"{p} {importlib.metadata.version(p)}" for p in packages]


def fp32_limit(model: torch.nn.Module, logits: torch.Tensor) -> float:
    """Returns the largest difference of FP32 logits that another order of summation can explain."""
    additions = sum(layer.in_features for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    # Each addition on the way to a logit has a rounding error of at most 2^-24 of the logit. The errors are
    # independent, so the square of their sum is about the sum of their squares.
    return 2.0**-24 * additions**0.5 * float(logits.abs().max())


def ulps(got: Tensor, want: Tensor) -> Tensor:
    """Returns the number of FP32 values from got to want, elementwise, int64."""

    def ordered(t: Tensor) -> Tensor:
        bits = t.contiguous().view(torch.int32).to(torch.int64)
        return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return (ordered(got) - ordered(want)).abs()


def _bug(what: str) -> UserError:
    return UserError(f"{what}; this is a bug, please report it")


def _compare(found: Iterable[tuple], weights: Weights) -> str:
    """Compares the layers that a package has read. Raises UserError at the first difference.

    found: (our name of the layer, packed codes, code values in FP32, block scales, values in FP32, values in BF16)
    """
    codes = scales = differ = furthest = layers = 0
    for name, packed, got_codes, got_scales, got, got_bf16 in found:
        t = weights.tensors[name]
        want_codes, want = decode_e2m1(unpack(t.codes)), t.dequantize()
        # The values are compared as well as the packed codes, because a package may read -0 as 0.
        if not torch.equal(packed, t.codes) or not torch.equal(got_codes, want_codes):
            raise _bug(f"{name}: the codes differ from those of the forward pass")
        if not torch.equal(got_scales.view(torch.uint8), t.scales.view(torch.uint8)):
            raise _bug(f"{name}: the block scales differ from the forward pass's")
        layers, codes, scales = layers + 1, codes + want.numel(), scales + t.scales.numel()
        furthest = max(furthest, int(ulps(got, want).max()))
        if furthest > MAX_ULPS:
            raise _bug(f"{name}: decoded values are {furthest} FP32 ulp apart")
        differ += int((got_bf16 != want.bfloat16()).sum())
    if layers != len(weights.tensors):
        raise _bug(f"{layers} of {len(weights.tensors)} quantized layers were found")
    return (
        f"{layers} layers: {codes:,} codes and {scales:,} block scales equal to the bit; decoded values differ by at "
        f"most {furthest} FP32 ulp, and {differ:,} of {codes:,} after rounding to BF16"
    )


def _layer(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.removeprefix(name + "."): t for key, t in tensors.items() if key.startswith(name + ".")}


def compressed_tensors(folder: Path, about: Description, weights: Weights) -> str:
    """Compares the codes, scales and values that the package compressed-tensors reads with the model's. Returns a line
    with the result. Raises UserError at the first difference, and if a package is missing."""
    versions = needs("compressed-tensors", "safetensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from safetensors.torch import load_file

    config = QuantizationConfig.model_validate(json.loads((folder / "config.json").read_text())["quantization_config"])
    schemes = {scheme.weights.num_bits: scheme for scheme in config.config_groups.values()}
    tensors, eight_bits = load_file(folder / WEIGHTS_FILE), weights.eight_bits
    for ours in eight_bits:
        parts, t = _layer(tensors, about.names[ours]), weights.tensors[ours]
        compressor = BaseCompressor.get_value_from_registry(schemes[8].format)
        values = compressor.decompress(parts, schemes[8])["weight"]
        numbers = about.rows(ours, parts["weight"].view(torch.uint8))
        if not torch.equal(numbers, t.codes.view(torch.uint8)):
            raise _bug(f"{ours}: the 8-bit numbers differ from those of the forward pass")
        if not torch.equal(about.rows(ours, values).float(), t.dequantize(values.dtype).float()):
            raise _bug(f"{ours}: decoded 8-bit values differ")
    weights = Weights({name: t for name, t in weights.tensors.items() if name not in eight_bits})
    if not weights.tensors:
        return f"{', '.join(versions)}: {len(eight_bits)} layers in FP8, equal to the bit"
    scheme = schemes[4]
    compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)

    def found():
        for ours in weights.tensors:
            parts = _layer(tensors, about.names[ours])
            packed, scale = parts["weight_packed"], parts["weight_scale"]
            codes = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], torch.float32)
            divisor = parts["weight_global_scale"]
            values = dequantize(codes, scale.float(), args=scheme.weights, dtype=torch.float32, global_scale=divisor)
            bf16 = compressor.decompress(parts, scheme)["weight"]
            yield ours, *(about.rows(ours, t) for t in (packed, codes, scale, values, bf16))

    also = f"; {len(eight_bits)} layers in FP8, equal to the bit" if eight_bits else ""
    return f"{', '.join(versions)}: {_compare(found(), weights)}{also}"


def gguf(folder: Path, about: Description, weights: Weights) -> str:
    """Compares the codes, scales and values that the gguf package reads with the model's. Returns a line with the
    result. Raises UserError at the first difference, and if the package is missing."""
    versions = needs("gguf")
    from gguf import GGMLQuantizationType, GGUFReader, dequantize

    read = {t.name: t for t in GGUFReader(folder / gguf_file.FILE_NAME).tensors}

    nvfp4 = GGMLQuantizationType.NVFP4
    written = {ours: theirs for ours, theirs in gguf_file.names(about).items() if ours in weights.tensors}
    written = {ours: theirs for ours, theirs in written.items() if read[f"{theirs}.weight"].tensor_type == nvfp4}

    def found():
        for ours, theirs in written.items():
            blocks, scale = (torch.tensor(read[f"{theirs}.{part}"].data) for part in ("weight", "scale"))
            mine = gguf_file.unpack_blocks(blocks, scale)
            one = torch.ones(mine.scales.shape).to(torch.float8_e4m3fn)
            codes = dequantize(gguf_file.pack_blocks(NVFP4Tensor(mine.codes, one, scale)).numpy(), nvfp4)
            values = torch.tensor(dequantize(blocks.numpy(), nvfp4)) * scale
            each = (mine.codes, torch.tensor(codes), mine.scales, values, values.bfloat16())
            yield ours, *(gguf_file.rows(about, ours, t, back=True) for t in each)

    weights = Weights({ours: weights.tensors[ours] for ours in written})
    return f"{', '.join(versions)}: {_compare(found(), weights)}"


def transformers_logits(folder: Path, ids: Tensor, quantized_inputs: bool = False) -> tuple[str, Tensor]:
    """Computes the logits of ids (B, T) with transformers. Returns (version and class, logits (B, T, V) in FP32).

    With quantized_inputs the model computes in BF16, with 4-bit inputs that compressed-tensors emulates. Otherwise it
    computes in FP32 with the decoded weights. Raises UserError if transformers is missing, or if the folder's modeling
    code is not this version's.
    """
    versions = needs("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()

    config_class, model_class = AutoConfig, AutoModelForCausalLM
    if (code := folder / MODELING_FILE).exists():
        from nanochat_fp4.export import modeling_nanochat_fp4 as ours

        if code.read_bytes() != Path(ours.__file__).read_bytes():
            raise UserError(f"{code} is not this version's; export the model again")
        config_class, model_class = ours.NanoChatFP4Config, ours.NanoChatFP4ForCausalLM
    config = config_class.from_pretrained(folder, trust_remote_code=False)
    four_bits = getattr(config, "quantization_config", None)
    if four_bits:
        config.quantization_config = {**four_bits, "dequantize": not quantized_inputs}
    dtype = torch.bfloat16 if quantized_inputs else torch.float32
    model = model_class.from_pretrained(folder, config=config, trust_remote_code=False, dtype=dtype)
    with torch.no_grad():
        return f"{versions[0]}, {type(model).__name__}", model.eval()(ids).logits.float()


def tokenizer(folder: Path, ours: RustBPETokenizer, texts: Iterable[str]) -> str:
    """Compares the token ids that transformers makes of the texts with ours. Returns a line with the result. Raises
    UserError for the first text with other ids, and if a package is missing."""
    versions = needs("transformers", "tokenizers")
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    count = tokens = 0
    for text in texts:
        want = ours.encode(text)
        if theirs(text, add_special_tokens=False)["input_ids"] != want or theirs.decode(want) != text:
            raise _bug(f"tokenizer.json gives other ids for {text[:60]!r}")
        count, tokens = count + 1, tokens + len(want)
    return f"{', '.join(versions)}: the same {tokens:,} ids of {count} texts"
