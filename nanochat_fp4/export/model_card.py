"""README.md of an exported model: what it is, how it was made, what it computes in, what was measured."""

from collections.abc import Mapping
from typing import Any


def model_card(
    meta: Mapping[str, Any],
    *,
    source: str,
    method: str,
    file_format: str,
    dtype: str,
    parameters: int,
    measured: Mapping[str, float],
    measured_on: str,
    notes: list[str],
    use: list[str],
) -> str:
    """The card as Markdown with the front matter that model hubs read.

    measured: what was computed -> bits per byte; measured_on: of which text, how many tokens, where.
    notes: sentences on what the format cannot hold and what to know. use: lines of Python.
    """
    user = dict(meta.get("user_config") or {})
    config = meta.get("model_config") or {}
    trained = [
        ("stage", source),
        ("steps", meta.get("step")),
        ("QAT method trained with", user.get("method") or "bf16"),
        ("forward pass exported", method),
        ("data", user.get("data_dir") or meta.get("data_dir") or "see the run's report"),
        ("tokens a step", user.get("total_batch_size")),
        ("sequence length", config.get("sequence_len")),
        ("parameters", f"{parameters:,}"),
        ("validation bits per byte, as training measured it", meta.get("val_bpb")),
    ]
    rows = "\n".join(f"| {name} | {value} |" for name, value in trained if value not in (None, ""))
    parts = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [nanochat, nvfp4]\n---",
        f"# {meta.get('model_tag') or 'model'}: a language model trained in NVFP4",
        f"Trained with nanochat_fp4, exported as `{file_format}`; what is not in 4 bits is in {dtype}.",
        f"| | |\n|---|---|\n{rows}",
    ]
    if measured:
        lines = "\n".join(f"| {what} | {value:.4f} |" for what, value in measured.items())
        parts += ["## Bits per byte", f"| forward pass | bits per byte |\n|---|---|\n{lines}", measured_on]
    if notes:
        parts += ["## What to know", "\n".join(f"- {note}" for note in notes)]
    parts += ["## Use", "\n".join(f"    {line}".rstrip() for line in use)]
    return "\n\n".join(parts) + "\n"
