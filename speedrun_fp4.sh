#!/usr/bin/env bash
# From nothing to a small GPT trained in NVFP4, and a report about it:
#
#     bash speedrun_fp4.sh
#
# On GPUs this is nanochat's speedrun: d20, 560M parameters, 11.2B tokens. On a CPU it is a small model that is done in
# less than ten minutes: a probe chooses 120, 60 or 30 steps. Run the script again and it reuses what is there;
# interrupted, it goes on. Variables:
#
#     QAT_METHOD=clover       how to quantize: bf16, fp8, nvidia, nvidia_full, four_over_six, tetrajet_v2, clover,
#                             clover_feedback, clover_feedback_late. The default is the paper's method, so that a first
#                             run is the paper's. clover_feedback ends lower for 2% more predicted time (docs/results.md)
#     RECIPES=mine.py         a Python file with methods of your own (nanochat_fp4.register)
#     COMPARE=1               also train the bf16 baseline, and report the gap to it
#     NANOCHAT_BASE_DIR=...   where data, checkpoints and the report go (default: ~/.cache/nanochat)
#     DATA_DIR=...            train on a folder of text or parquet files of your own
#     WANDB_RUN=name          log to Weights & Biases, or with TRACKER=trackio to a local page
#     NPROC=2                 processes (default: one for each GPU)
#     STAGES="tok base loss report"    only some stages
#     PLAN_ONLY=1             print the plan and stop; with GPU=rtx5090 (rtx5080, rtxpro6000, b200, gb10, ...) that of one
#                             such GPU, and how long it would take
#     DEPTH=6 NUM_ITERATIONS=500 ...   any number that the plan prints
#     BASE_ARGS="--matrix-lr=0.01"     more flags for scripts/base_train.py (MID_ARGS, SFT_ARGS, EVAL_ARGS likewise)
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$ROOT"
source dev/setup.sh
source dev/pipeline.sh

if [ "$NUM_GPUS" -gt 0 ] || [ -n "${GPU:-}" ]; then
    # Chinchilla: 20 tokens a parameter, 561M * 20 = 11.2B tokens = 54B characters at 4.8 a token; a shard holds 250M
    # characters, so 216 shards, and best-fit packing crops 35% of them away: 216 / 0.65, rounded up, with some spare.
    # The numbers are those of nanochat's speedrun.sh (f5425245f), but: DEVICE_BATCH is measured, where nanochat has 32,
    # of the same total batch; and SAVE_EVERY, where nanochat saves at the end alone, so that little is lost.
    choose DEPTH=20 ASPECT_RATIO=64 HEAD_DIM=128 SEQ_LEN=2048 WINDOW_PATTERN=SSSL VOCAB_SIZE=65536 \
        DATA_RATIO=20 NUM_ITERATIONS=-1 TOTAL_BATCH=524288 DEVICE_BATCH=auto SEED=42 \
        MATRIX_LR=0.02 EMBEDDING_LR=0.3 UNEMBEDDING_LR=0.004 \
        NUM_SHARDS=370 TOK_SHARDS=8 TOK_CHARS=2000000000 \
        EVAL_EVERY=250 EVAL_TOKENS=10485760 SAMPLE_EVERY=2000 CORE_EVERY=2000 SAVE_EVERY=1000 \
        EVAL_BATCH=32 SPLIT_TOKENS=20971520
else
    # Five minutes on a quiet core; ten beside busy processes, where the probe chooses fewer steps.
    choose DEPTH=2 ASPECT_RATIO=64
    choose_for_a_cpu 5 120
fi
pipeline "speedrun"
