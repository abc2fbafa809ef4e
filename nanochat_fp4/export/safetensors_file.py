"""The safetensors format: 8 bytes with the length of a JSON header, the header, the tensors' bytes one after another.

Written and read here rather than with the package of that name, so that an export needs nothing installed: the format
is these few lines, and scripts.export --verify reads the file with the package.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from nanochat_fp4.errors import UserError, one_line
from nanochat_fp4.files import atomic_open

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I64": torch.int64,
    "I32": torch.int32,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # bytes, as in the package


def save(path: str | os.PathLike, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] = {}) -> None:
    """Writes the tensors (of DTYPES, on any device), all or nothing. Raises ValueError for another dtype."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name} is {tensor.dtype}, which is not one of {', '.join(DTYPES)}; convert it")
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors begin at a multiple of 8
    with atomic_open(path) as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            f.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def load(path: str | os.PathLike) -> dict[str, torch.Tensor]:
    """The tensors of a file, on the CPU. Raises UserError (missing, cut short, not of this format)."""
    path = Path(path)
    try:
        data = bytearray(path.read_bytes())
        length = int.from_bytes(data[:8], "little")
        if len(data) < 8 or length > _MAX_HEADER:
            raise ValueError("no header")
        header = json.loads(bytes(data[8 : 8 + length]))
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype, shape, (start, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
            begin, size = 8 + length + start, end - start
            if start < 0 or size < 0 or begin + size > len(data):
                raise ValueError(f"{name} lies beyond the file's end")
            flat = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=begin) if size else torch.empty(0)
            tensors[name] = flat.to(torch.uint8).clone().view(dtype).view(shape)
        return tensors
    except FileNotFoundError as e:
        raise UserError(f"{path} is not there; name a folder that scripts.export wrote") from e
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as e:
        raise UserError(f"{path} is not a whole safetensors file ({one_line(e)[:100]}); export it again") from e
