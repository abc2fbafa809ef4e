#!/usr/bin/env bash
# The $1000 tier: d32, 1.9B parameters, 38B tokens; about 40 hours on 8 H100 in BF16. Same variables as speedrun_fp4.sh.
# Without a GPU the same stages run on a small model, to see that they do.
#
#     PLAN_ONLY=1 bash run1000_fp4.sh     print the plan and stop
#     bash run1000_fp4.sh
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$ROOT"
source dev/setup.sh
source dev/pipeline.sh

if [ "$NUM_GPUS" -gt 0 ] || [ -n "${GPU:-}" ]; then
    # 1.88B parameters * 20 = 37.6B tokens = 180B characters at 4.8 a token = 720 shards of 250M characters; with some
    # spare 800, and best-fit packing crops 35% of them away: 800 / 0.65 = 1200, rounded down.
    # Differs from nanochat's run1000.sh as the speedrun does; DEVICE_BATCH is 8 there.
    choose DEPTH=32 ASPECT_RATIO=64 HEAD_DIM=128 SEQ_LEN=2048 WINDOW_PATTERN=SSSL VOCAB_SIZE=65536 \
        DATA_RATIO=20 NUM_ITERATIONS=-1 TOTAL_BATCH=524288 DEVICE_BATCH=auto SEED=42 \
        MATRIX_LR=0.02 EMBEDDING_LR=0.3 UNEMBEDDING_LR=0.004 \
        NUM_SHARDS=1200 TOK_SHARDS=16 TOK_CHARS=4000000000 \
        EVAL_EVERY=250 EVAL_TOKENS=10485760 SAMPLE_EVERY=2000 CORE_EVERY=2000 SAVE_EVERY=1000 \
        EVAL_BATCH=8 SPLIT_TOKENS=20971520 MID_ARGS="--device-batch-size=8"
else
    # Every stage, twice as deep as the speedrun's stand-in.
    choose DEPTH=4 ASPECT_RATIO=32
    choose_for_a_cpu 10 160
fi
pipeline "run1000"
