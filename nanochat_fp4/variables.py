"""
The variables that tell speedrun_fp4.sh, run1000_fp4.sh and dev/measure.sh what to do, and their defaults. This file
needs the standard library alone, because the scripts ask it before anything is installed:

    python3 nanochat_fp4/variables.py            refuses a variable that is nearly one of these
    python3 nanochat_fp4/variables.py measure    the same of dev/measure.sh
    python3 nanochat_fp4/variables.py seconds 20    dev/measure.sh's time limits for a d20
"""

import difflib
import os
import sys

# Variable -> (the script and its flag, the default on a GPU, the default on a CPU). On a GPU the numbers are those of
# nanochat's speedrun.sh (f5425245f), with three exceptions. DEVICE_BATCH is measured, where nanochat has 32. SAVE_EVERY
# is set, where nanochat saves at the end alone. NUM_SHARDS 0 is chosen by the tokens of the run. On a CPU the numbers
# are those of a small model that trains in minutes. base_train lowers the learning rates by sqrt(batch / 2^19), which
# is too careful for a few hundred steps, so these rates are nanochat's with that undone.
NUMBERS: dict[str, tuple[str, int | float | str, int | float | str]] = {
    "DEPTH": ("base_train --depth", 20, 2),
    "ASPECT_RATIO": ("base_train --aspect-ratio", 64, 64),
    "HEAD_DIM": ("base_train --head-dim", 128, 64),
    "SEQ_LEN": ("base_train --max-seq-len", 2048, 256),
    "WINDOW_PATTERN": ("base_train --window-pattern", "SSSL", "L"),
    "VOCAB_SIZE": ("tok_train --vocab-size", 65536, 4096),
    "DATA_RATIO": ("base_train --target-param-data-ratio", 20, -1),
    "NUM_ITERATIONS": ("base_train --num-iterations", -1, 120),
    "TOTAL_BATCH": ("base_train --total-batch-size", 524288, 2048),
    "DEVICE_BATCH": ("base_train --device-batch-size", "auto", 8),
    "SEED": ("base_train --seed", 42, 42),
    "MATRIX_LR": ("base_train --matrix-lr", 0.02, 0.32),
    "EMBEDDING_LR": ("base_train --embedding-lr", 0.3, 4.8),
    "UNEMBEDDING_LR": ("base_train --unembedding-lr", 0.004, 0.064),
    "NUM_SHARDS": ("", 0, 2),
    "TOK_SHARDS": ("", 8, 2),
    "TOK_CHARS": ("tok_train --max-chars", 2_000_000_000, 10_000_000),
    "EVAL_EVERY": ("base_train --eval-every", 250, 40),
    "EVAL_TOKENS": ("base_train --eval-tokens", 10_485_760, 16_384),
    "SAMPLE_EVERY": ("base_train --sample-every", 2000, -1),
    "CORE_EVERY": ("base_train --core-metric-every", 2000, -1),
    "SAVE_EVERY": ("base_train --save-every", 1000, 20),
    "EVAL_BATCH": ("base_loss --device-batch-size", 32, 8),
    "SPLIT_TOKENS": ("base_loss --split-tokens", 20_971_520, 65_536),
}
ARGS = ("BASE_ARGS", "CORE_ARGS", "MID_ARGS", "SFT_ARGS", "EVAL_ARGS")  # more flags of a stage
# The variables of a run alone, and those that a user may have exported for every command.
OF_A_RUN = ("QAT_METHOD", "COMPARE", "STAGES", "NPROC", "GPU", "GPU_MEMORY")
EXPORTED = (
    "RECIPES", "PLAN_ONLY", "DATA_DIR", "TEXT_COLUMN", "NANOCHAT_BASE_DIR", "NANOCHAT_EVAL_DIR", "WANDB_RUN",
    "VENV", "PYTHON", "PYTHONPATH", "PIP_TORCH_ARGS",
)  # fmt: skip
RUN = (*NUMBERS, *ARGS, *OF_A_RUN, *EXPORTED)
MEASURE = ("PARTS", "DRY_RUN", "DEPTH", "LIMIT", "OUT", "NANOCHAT", "PY")  # of dev/measure.sh
ELSEWHERE = {  # What is meant -> names that other programs have for it.
    "DEVICE_BATCH (rows of a micro-batch) or TOTAL_BATCH (tokens of a step)": "BATCH BATCH_SIZE",
    "DEVICE_BATCH": "DEVICE_BATCH_SIZE MICRO_BATCH MICRO_BATCH_SIZE",
    "TOTAL_BATCH": "TOTAL_BATCH_SIZE",
    "NUM_ITERATIONS": "NUM_STEPS MAX_STEPS STEPS ITERATIONS",
    "DATA_DIR": "DATA DATASET",
    "NANOCHAT_BASE_DIR": "BASE_DIR BASEDIR",
    "DATA_RATIO (tokens for each parameter) or NUM_ITERATIONS": "EPOCHS NUM_EPOCHS RATIO TOKENS NUM_TOKENS",
    "MATRIX_LR, EMBEDDING_LR and UNEMBEDDING_LR": "LR LEARNING_RATE",
    "SEQ_LEN": "MAX_SEQ_LEN",
    "DEPTH": "NUM_LAYERS N_LAYER",
    "NPROC": "NPROC_PER_NODE NUM_GPUS GPUS",
    "GPU_MEMORY": "MEMORY VRAM GPU_MEM GPU_RAM GPU_VRAM GPU_GIB GPU_GB MEMORY_GIB MEMORY_GB",
    "QAT_METHOD": "METHOD METHODS",
    "CUDA_VISIBLE_DEVICES= (an empty list of GPUs, so that the CPU trains)": "DEVICE_TYPE",
    "PLAN_ONLY": "DRY_RUN",
    "STAGES": "PARTS",
    "SFT_ARGS=--sft-dir=FOLDER": "SFT_DIR",
    "BASE_ARGS=--model-tag=NAME (by default a run's name says what differs from the defaults)": "MODEL_TAG",
}
MEANT = {name: meant for meant, names in ELSEWHERE.items() for name in names.split()}


def problem(names: set[str], script: str = "speedrun") -> str | None:
    """One line on the first variable that would be ignored: it is nearly a known one, or it is of a run and the script
    is dev/measure.sh ("measure"). None if there is none."""
    known = MEASURE + EXPORTED if script == "measure" else RUN
    # Other programs export names in lower case, such as out and py, so only names that are of no other program count.
    of_this = ("PARTS", "LIMIT", "DRY_RUN", "DEPTH") if script == "measure" else (*NUMBERS, *ARGS, *OF_A_RUN)
    # The other script's variables may be exported, too, such as NANOCHAT, unless they mean something else here.
    for name in sorted(names - set(known) - (set(MEASURE) - MEANT.keys())):
        if name.upper() in of_this:
            return f"{name} is set, and names of variables are in capitals; set {name.upper()}, and unset {name}"
        meant = MEANT.get(name)
        alike = {name, name.removesuffix("S"), meant}
        if script == "measure" and not alike & {*known} and (meant or alike & {*RUN}):
            has = f"dev/measure.sh, which has {' '.join(MEASURE)}, does not take it: it measures the card that is here"
            return f"{name} is set, and {has}; unset {name} (python -m lab.bench steps --help has more)"
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        near += [k for k in known if sorted(k) == sorted(name) or k.startswith(f"{name}_")]
        if meant or near:
            return f"{name} is set, and there is no such variable; did you mean {meant or near[0]}? Unset {name} if not"
    return None


def measure_seconds(depth: int) -> tuple[int, int, int]:
    """The time limits of the parts doctor, layers and steps of dev/measure.sh. The time of a step grows with the
    weights, which is with the cube of the depth."""
    return 300, 240, max(640, 640 * depth**3 // 20**3)


if __name__ == "__main__":
    if sys.argv[1:2] == ["seconds"]:
        print(*measure_seconds(int(sys.argv[2])))
    elif found := problem(set(os.environ), *sys.argv[1:]):
        sys.exit(f"error: {found}")
