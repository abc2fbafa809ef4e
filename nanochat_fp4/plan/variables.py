"""
Names of the variables that tell speedrun_fp4.sh, run1000_fp4.sh and dev/measure.sh what to do.

    python3 nanochat_fp4/plan/variables.py            refuses a variable that is nearly one of them; imports no package
    python3 nanochat_fp4/plan/variables.py measure    the same of dev/measure.sh
    python3 nanochat_fp4/plan/variables.py speedrun --depth     what to type in the place of a flag; measure likewise
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
# Those of a run alone, and those that a user may have exported for every command.
OF_A_RUN = ("QAT_METHOD", "METHOD", "COMPARE", "STAGES", "NPROC", "GPU", "GPU_MEMORY")
EXPORTED = (
    "RECIPES", "PLAN_ONLY", "DATA_DIR", "TEXT_COLUMN", "NANOCHAT_BASE_DIR", "NANOCHAT_EVAL_DIR", "WANDB_RUN", "TRACKER",
    "VENV", "PYTHON", "PYTHONPATH", "PIP_TORCH_ARGS",
)  # fmt: skip
KNOWN = NUMBERS + ARGUMENTS + OF_A_RUN + EXPORTED
MEASURE = ("PARTS", "DRY_RUN", "LIMIT", "OUT", "NANOCHAT", "PY")  # of dev/measure.sh
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
    "DEVICE_TYPE": "CUDA_VISIBLE_DEVICES= (an empty list of GPUs, so that the CPU trains)",
    "DRY_RUN": "PLAN_ONLY",
    "PARTS": "STAGES",
    "MODEL_TAG": "NANOCHAT_BASE_DIR (a folder of its own; a run's name says what differs from the defaults)",
}


def problem(names: set[str], script: str = "speedrun") -> str | None:
    """One line on the first variable that would be ignored although a known one is meant, or that would be ignored by
    dev/measure.sh (script "measure") because it is of a run; None where there is none."""
    known = MEASURE + EXPORTED if script == "measure" else KNOWN
    # Other programs export names in lower case, such as out and py, so those that are of no run alone stay unnoticed.
    of_this = ("PARTS", "LIMIT", "DRY_RUN") if script == "measure" else NUMBERS + ARGUMENTS + OF_A_RUN
    for name in sorted(names - set(known)):
        if name.upper() in of_this:
            return f"{name} is set, and names of variables are in capitals; set {name.upper()}, and unset {name}"
        if script == "measure" and (name in KNOWN or name.removesuffix("S") in KNOWN):
            has = f"dev/measure.sh, which has {' '.join(MEASURE)}, does not take it"
            return f"{name} is set, and {has}; unset {name}, or see python -m lab.bench steps --help"
        alike = difflib.get_close_matches(name, known, n=1, cutoff=0.85) or [
            k for k in known if sorted(k) == sorted(name)
        ]
        meant = ELSEWHERE.get(name) if script != "measure" else None
        meant = meant or (alike[0] if alike else "")
        if meant:
            return f"{name} is set, and there is no such variable here; did you mean {meant}? Unset {name} if not"
    return None


def in_place_of(flag: str, script: str) -> str:
    """What to type in the place of a flag, which is --name or --name=value, of a script that takes none."""
    flag = flag.partition("=")[0]
    name = flag.removeprefix("--").replace("-", "_").upper()
    if script == "measure":
        return f"set {name}=... in its place" if name in MEASURE else f"it has the variables {' '.join(MEASURE)}"
    name = "QAT_METHOD" if name == "METHOD" else name
    if name in ELSEWHERE:
        return f"set {ELSEWHERE[name]}"
    return f"set {name}=... in its place" if name in KNOWN else f"BASE_ARGS={flag}=... gives it to the base training"


if __name__ == "__main__":
    if sys.argv[2:]:
        print(in_place_of(sys.argv[2], sys.argv[1]))
    elif found := problem(set(os.environ), *sys.argv[1:]):
        sys.exit(f"error: {found}")
