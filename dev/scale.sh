#!/usr/bin/env bash
# What docs/scale.md says of the GPUs of a host: its table. The curves and the killed run beside it are in dev/LOG.md.
#
#     bash dev/scale.sh
#
#     GPUS=2                      how many processes: 2, 4 or 8
#     OUT=...                     numbers and logs, which grow as it measures (default: scale/ here, scale_try/ with TRY)
#     PY=python LIMIT=300         which python; seconds for a row
#     TRY=1                       all of it in small, on CPUs too: to see that it works
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
GPUS=${GPUS:-2} OUT=${OUT:-$PWD/scale${TRY:+_try}} PY=${PY:-python} LIMIT=${LIMIT:-300}
export NANOCHAT_BASE_DIR=$OUT/base PYTHONPATH=$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
mkdir -p "$NANOCHAT_BASE_DIR" || exit 1
models=("--depth=26 --micro-batch=32 --seconds=10" "--depth=32 --micro-batch=16 --seconds=10")
if [ -n "${TRY:-}" ]; then
    models=("--depth=2 --micro-batch=2 --aspect-ratio=128 --head-dim=64 --vocab-size=256 --seq-len=64 --total-batch-size=512 --no-compile --seconds=1")
fi
bench() { # model, processes, flags ...
    timeout -k 10 "$LIMIT" "$PY" -m torch.distributed.run --standalone --nproc_per_node="$2" \
        -m lab.bench parallel $1 --json="$OUT/bench_parallel.jsonl" "${@:3}" > "$OUT/row.log" 2>&1
    grep -e "tokens/s" -e "error:" "$OUT/row.log" || tail -n 1 "$OUT/row.log"
}
for model in "${models[@]}"; do
    bench "$model" 1
    for mode in "ddp" "fsdp --gather=codes" "fsdp --gather=bf16"; do bench "$model" "$GPUS" --parallel=$mode; done
done
