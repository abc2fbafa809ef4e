"""
Names of the variables that tell speedrun_fp4.sh and run1000_fp4.sh what to do.

    python3 nanochat_fp4/plan/variables.py      refuses a variable that is nearly one of them; imports no package
"""

import difflib
import os
import sys

# Each is a number of the run that the plan prints (settings.py).
NUMBERS = (
    "DEPTH", "ASPECT_RATIO", "HEAD_DIM", "SEQ_LEN", "WINDOW_PATTERN", "VOCAB_SIZE", "DATA_RATIO", "NUM_ITERATIONS",
    "TOTAL_BATCH", "DEVICE_BATCH", "SEED", "MATRIX_LR", "EMBEDDING_LR", "UNEMBEDDING_LR", "NUM_SHARDS", "TOK_SHARDS",
    "TOK_CHARS", "EVAL_EVERY", "EVAL_TOKENS", "SAMPLE_EVERY", "CORE_EVERY", "SAVE_EVERY", "EVAL_BATCH", "SPLIT_TOKENS",
)  # fmt: skip
ARGUMENTS = ("BASE_ARGS", "CORE_ARGS", "MID_ARGS", "SFT_ARGS", "EVAL_ARGS")  # more flags of a stage
OTHERS = (
    "QAT_METHOD", "METHOD", "RECIPES", "COMPARE", "STAGES", "NPROC", "PLAN_ONLY", "GPU", "GPU_MEMORY", "DATA_DIR",
    "TEXT_COLUMN", "NANOCHAT_BASE_DIR", "NANOCHAT_EVAL_DIR", "WANDB_RUN", "TRACKER", "VENV", "PYTHON", "PYTHONPATH",
    "PIP_TORCH_ARGS",
)  # fmt: skip
KNOWN = NUMBERS + ARGUMENTS + OTHERS
# Names that other programs have for the same thing, and what is meant here.
ELSEWHERE = {
    "BATCH_SIZE": "DEVICE_BATCH (rows of a micro-batch) or TOTAL_BATCH (tokens of a step)",
    "DEVICE_BATCH_SIZE": "DEVICE_BATCH",
    "MICRO_BATCH": "DEVICE_BATCH",
    "TOTAL_BATCH_SIZE": "TOTAL_BATCH",
    "NUM_STEPS": "NUM_ITERATIONS",
    "MAX_STEPS": "NUM_ITERATIONS",
    "STEPS": "NUM_ITERATIONS",
    "ITERATIONS": "NUM_ITERATIONS",
    "EPOCHS": "DATA_RATIO (tokens for each parameter) or NUM_ITERATIONS",
    "NUM_EPOCHS": "DATA_RATIO (tokens for each parameter) or NUM_ITERATIONS",
    "LR": "MATRIX_LR, EMBEDDING_LR and UNEMBEDDING_LR",
    "LEARNING_RATE": "MATRIX_LR, EMBEDDING_LR and UNEMBEDDING_LR",
    "MAX_SEQ_LEN": "SEQ_LEN",
    "NUM_LAYERS": "DEPTH",
    "N_LAYER": "DEPTH",
    "NPROC_PER_NODE": "NPROC",
    "NUM_GPUS": "NPROC",
    "MODEL_TAG": "NANOCHAT_BASE_DIR (a folder of its own; a run's name says what differs from the defaults)",
}


def problem(names: set[str]) -> str | None:
    """One line on the first variable that would be ignored although one of KNOWN is meant; None where there is none."""
    for name in sorted(names - set(KNOWN)):
        alike = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.85) or [
            k for k in KNOWN if sorted(k) == sorted(name)
        ]
        meant = ELSEWHERE.get(name) or (alike[0] if alike else "")
        if meant:
            return f"{name} is set, and there is no such variable here; did you mean {meant}? Unset {name} if not"
    return None


if __name__ == "__main__":
    if found := problem(set(os.environ)):
        sys.exit(f"error: {found}")
