#!/usr/bin/env bash
# From nothing to a small GPT trained in NVFP4, and a report about it:
#
#     bash speedrun_fp4.sh
#
# On GPUs this is nanochat's speedrun: d20, 560M parameters, 11.2B tokens. On a CPU it is a small model that is done in
# some five minutes: a probe chooses 120, 60 or 30 steps. Run the script again and it reuses what is there;
# interrupted, it goes on. Variables:
#
#     QAT_METHOD=clover       how to quantize: bf16, fp8, nvidia, nvidia_full, four_over_six, tetrajet_v2, clover,
#                             clover_fp8_forward; quartet2 is clover. The default is the paper's method, so that a
#                             first run is the paper's. The plan says which one to take on this GPU: on a Blackwell
#                             clover_fp8_forward if dev/measure.sh finds it faster than fp8 by enough, else fp8
#     RECIPES=mine.py         a Python file with methods of your own (nanochat_fp4.register); several with commas
#     COMPARE=1               also train the bf16 baseline, and report the gap to it
#     NANOCHAT_BASE_DIR=...   where data, checkpoints and the report go (default: ~/.cache/nanochat_fp4)
#     DATA_DIR=...            train on a folder of your own with txt, md, json, jsonl, csv or parquet files, or on one file
#     TEXT_COLUMN=text        the column, or JSON field, that holds the text of DATA_DIR
#     WANDB_RUN=name          log to Weights & Biases
#     NPROC=2                 processes (default: one for each GPU)
#     STAGES="tok base loss report"    only some stages
#     PLAN_ONLY=1             print the plan and stop; with GPU=rtx5090 that of one such GPU, and with NPROC=2 of two.
#                             GPU_MEMORY=24 (GiB) makes a plan for a GPU that is not in nanochat_fp4/cards.json
#     DEPTH=6 NUM_ITERATIONS=500 ...   any number that PLAN_ONLY=all prints
#     NUM_ITERATIONS=4        on a CPU a trial of all stages in about two minutes, because fewer steps of the base
#                             training make the later stages shorter, too
#     BASE_ARGS="--matrix-lr=0.01"     more flags for scripts/base_train.py (MID_ARGS, SFT_ARGS, EVAL_ARGS likewise)
[ -n "${BASH_VERSION:-}" ] || { echo "error: type bash in the place of sh: bash $0" >&2; exit 2; }
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$ROOT"
source dev/setup.sh
only_variables "$@"
source dev/pipeline.sh
pipeline speedrun
