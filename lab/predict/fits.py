"""The predicted time of what the backward pass computes again from codes (lab.measure.bench_memory)."""

from lab.predict.machines import Machine
from lab.predict.step_time import BF16, CODES, DECODE_INSTRUCTIONS, Shape, Step, gemm_step, predicted_ms
from nanochat_fp4.nvfp4.methods import get_recipe

# Bytes a token and block: of each unit of the width, of each head, and besides (bench_memory counts the same).
BLOCK_BYTES = {
    "bf16": {"none": (26.0, 12, 8), "codes": (16.0, 4, 8), "codes-mlp": (16.0, 4, 8), "mlp": (16.0, 12, 4),
             "all": (6.0, 0, 0)},
    "codes": {"none": (21.9375, 12, 12), "codes": (11.9375, 4, 12), "codes-mlp": (7.9375, 4, 8),
              "mlp": (15.125, 12, 4), "all": (6.0, 0, 0)},
}  # fmt: skip
# What codes determine and a backward pass computes again (models/recompute.py). Three numbers for each tensor:
# units of the width that are not kept; columns of its product, in widths; more bytes of glue for each token and unit of
# width (lab.predict.glue, sm_120). torch.compile computes the first tensor again anyway.
AGAIN = {
    "stream after the lambdas": (2, 0, 0.0),
    "queries, keys, values": (6, 3, 4.2),
    "stream into the second norm": (2, 1, 6.0),
    "relu(x)": (4, 4, 4.0),
}


def again_ms(shape: Shape, method: str, tensor: str, machine: Machine, tokens: float) -> float:
    """Predicted milliseconds for a tensor of AGAIN in one micro-batch: a product, glue, and decoding without FP4."""
    quantized, w, (_, columns, glue) = get_recipe(method).quantizes, shape.width, AGAIN[tensor]
    native, n = quantized and machine.fp4 is not None, columns * shape.width
    steps = [Step("glue", glue * w * tokens)] if glue else []
    if n:
        steps.append(gemm_step("again", tokens, n, w, "fp4" if native else "bf16"))
    if n and quantized and not native:
        sizes = tokens * w, n * w
        steps += [Step("decode", size * (CODES + BF16), size * DECODE_INSTRUCTIONS) for size in sizes]
    return shape.depth * sum(predicted_ms(step, machine) for step in steps)
