#!/usr/bin/env bash
# What docs/scale.md says of several GPUs of a host: its table, the loss curves of 1 process, ddp and fsdp over one
# another, and a run of which one process is killed.
#
#     DATA_DIR=... bash dev/scale.sh
#
#     PARTS="table curves kill"   only these
#     GPUS=2                      how many processes: 2, 4 or 8 (the curves: ddp of 2, 4, ... and fsdp of all)
#     OUT=...                     numbers, logs and the picture (default: scale/ here), which grow as it measures
#     DATA_DIR                    text as parquet, one text a row (curves, kill); the last shard is validation
#     PY=python LIMIT=300         which python; seconds for a row or a run
#     TRY=1                       all of it in small, on CPUs too: to see that it works
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
PARTS=${PARTS:-table curves kill} GPUS=${GPUS:-2} OUT=${OUT:-$PWD/scale} PY=${PY:-python} LIMIT=${LIMIT:-300}
[ "$PARTS" = table ] || [ -d "${DATA_DIR:-}" ] || { echo "error: DATA_DIR=${DATA_DIR:-} is no folder; give one with parquet shards, or PARTS=table" >&2; exit 2; }
export DATA_DIR NANOCHAT_BASE_DIR=$OUT/base PYTHONPATH=$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
mkdir -p "$NANOCHAT_BASE_DIR" || exit 1
runs=$NANOCHAT_BASE_DIR/base_checkpoints
models=("--depth=26 --micro-batch=32 --seconds=10" "--depth=32 --micro-batch=16 --seconds=10")
tokens="--vocab-size=8192 --max-chars=20000000" every=20 kill_at=30 steps=300 kill_steps=60
flags="--depth=12 --device-batch-size=4 --total-batch-size=65536 --eval-every=100 --eval-tokens=131072"
if [ -n "${TRY:-}" ]; then
    models=("--depth=2 --micro-batch=2 --aspect-ratio=128 --head-dim=64 --vocab-size=256 --seq-len=64 --total-batch-size=512 --no-compile --seconds=1")
    tokens="--vocab-size=400 --max-chars=200000" every=2 kill_at=3 steps=6 kill_steps=8
    flags="--depth=1 --aspect-ratio=64 --head-dim=64 --max-seq-len=64 --device-batch-size=1 --total-batch-size=512 --eval-every=3 --eval-tokens=512"
fi
ranks() { timeout -k 10 "$LIMIT" "$PY" -m torch.distributed.run --standalone --nproc_per_node="$@"; }
train() { # tag, processes, flags ...
    [ -d "$NANOCHAT_BASE_DIR/tokenizer" ] || "$PY" -m scripts.tok_train $tokens > "$OUT/tokenizer.log" 2>&1 || exit 1
    ranks "$2" ${RESTARTS:-} -m scripts.base_train --model-tag="$1" --method=clover --core-metric-every=-1 \
        --sample-every=-1 --resume-from-step=latest $flags "${@:3}" > "$OUT/$1.log" 2>&1
}
bench() { # model, processes, flags ...
    ranks "$2" -m lab.measure.bench_parallel $1 --json="$OUT/bench_parallel.jsonl" "${@:3}" > "$OUT/row.log" 2>&1
    grep -e "tokens/s" -e "error:" "$OUT/row.log" || tail -n 1 "$OUT/row.log"
}
table() {
    local model mode
    for model in "${models[@]}"; do
        bench "$model" 1
        for mode in "ddp" "fsdp --gather=codes" "fsdp --gather=bf16"; do bench "$model" "$GPUS" --parallel=$mode; done
        [[ $model == *depth=26* ]] || bench "$model" "$GPUS" --parallel=tp # 13 heads are not divided
    done
}
curves() {
    local n names="one"
    train one 1 --num-iterations=$steps
    for ((n = 2; n <= GPUS; n *= 2)); do
        train "ddp$n" "$n" --num-iterations=$steps
        names+=" ddp$n"
    done
    train fsdp "$GPUS" --parallel=fsdp --num-iterations=$steps
    "$PY" -c 'import pathlib, sys
from nanochat_fp4.evaluation import metrics, plots
def plot(axes):
    for name in sys.argv[3:]:
        records = metrics.read_jsonl(pathlib.Path(sys.argv[2], name, "metrics.jsonl"))
        plots.curve(axes, name, [tuple(zip(*((r["step"], r["loss"]) for r in records if r["event"] == "train")))])
    axes.set(xlabel="step", ylabel="training loss")
plots.draw(pathlib.Path(sys.argv[1]), "Losses of 1 process, ddp and fsdp", plot)' "$OUT/curves.png" "$runs" $names fsdp
}
kill_one() { # the last process of a sharded run; torchrun starts all of them again, from the newest checkpoint
    rm -rf "$runs/killed"
    RESTARTS=--max-restarts=1 train killed "$GPUS" --parallel=fsdp --save-every=$every --num-iterations=$kill_steps &
    local run=$! victim=""
    until [ "$(grep -c '"train"' "$runs/killed/metrics.jsonl" 2> /dev/null)" -ge $kill_at ] 2> /dev/null; do
        kill -0 $run 2> /dev/null || { tail -n 3 "$OUT/killed.log"; return; }
        sleep 0.2
    done
    # torchrun starts the processes one after the other; what has its command line and is older is `timeout`.
    victim=$(pgrep -P "$(pgrep -f "torch.distributed.run .*--model-tag=killed" | sort -n | tail -n 1)" | sort -n | tail -n 1)
    echo "SIGKILL to process $victim after $kill_at steps, at $(date +%T.%1N)"
    kill -9 "$victim"
    wait $run
    echo "ended with status $? at $(date +%T.%1N)"
    grep -a -e "error: rank" -e "exitcode: -9" -e "Resuming" -e "step 000" "$OUT/killed.log" | cut -c1-160 | tail -n 12
}
for part in $PARTS; do
    echo "== $part"
    case $part in
    table) table ;;
    curves) curves ;;
    kill) kill_one ;;
    *) echo "error: PARTS: there is no part '$part'; the parts are: table curves kill" >&2 && exit 2 ;;
    esac
done
