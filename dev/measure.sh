#!/usr/bin/env bash
# Measures on this machine's GPU what README.md and docs/ say about one:
#
#     bash dev/measure.sh                      # 20 minutes at most; 33 with DEPTH=26, and 53 with DEPTH=32
#
# The plan of a run takes these speeds (PLAN_ONLY=1 bash speedrun_fp4.sh), unless OUT names another folder. It is printed
# with them: which method to take, and how long. The last lines say what to send, and where.
#
# Every part has a time limit and a log in $OUT, the benchmarks a JSON as well, which grows as they measure. A part that
# fails leaves the others; a summary comes last, and the exit status is 1 if anything failed. Variables:
#
#     PARTS="doctor layers"    only these; PARTS=all: everything, 60 minutes
#     DRY_RUN=1                the same parts and methods in small, on any machine: do they work? Steps are then of a tiny
#                              d2, whatever DEPTH says, and its numbers are not worth sending
#     DEPTH=26                 the model whose steps are timed (default: 20, the speedrun's). A deeper one gets more time
#     LIMIT=60                 seconds for each part, in the place of its own limit
#     PLAN_ONLY=1              print the commands and stop
#     OUT=...                  where logs and numbers go (default: measurements/ in the base directory, and
#                              measurements_dry_run/ with DRY_RUN)
#     NANOCHAT=...             a checkout of karpathy/nanochat (revision f5425245f) to be timed as well, in 7 minutes
#     PY=python3               the python to use as it is (default: VENV, or .venv, which is made; see dev/setup.sh)
set -uo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT" || exit 2
source dev/setup.sh
only_variables "$@"
known_variables measure
[[ ${LIMIT:-1} =~ ^[1-9][0-9]*$ ]] || die "LIMIT=$LIMIT: expected whole seconds, such as LIMIT=60; set another number or leave LIMIT out"
depth=${DEPTH:-20}
[[ $depth =~ ^[1-9][0-9]?$ ]] || die "DEPTH=$DEPTH: expected whole layers, such as DEPTH=12; set another number or leave DEPTH out"
read -r doctor_limit layers_limit steps_limit <<<"$("$(find_python)" "$VARIABLES" seconds "$depth")" # as the plan says
for name in NANOCHAT_BASE_DIR NANOCHAT OUT; do
    [ -z "${!name:-}" ] || export "$name=$(of_the_caller "${!name}")"
done
[ -z "${NANOCHAT:-}" ] || [ -f "$NANOCHAT/nanochat/gpt.py" ] ||
    die "NANOCHAT=$NANOCHAT is no checkout of karpathy/nanochat, for it has no nanochat/gpt.py; name one or leave NANOCHAT out"
KNOWN="doctor tests layers steps steps_32gib steps_nanochat"
PARTS=${PARTS:-doctor layers steps${NANOCHAT:+ steps_nanochat}}
[ "$PARTS" != all ] || PARTS=$KNOWN
for name in $PARTS; do
    [[ " $KNOWN " == *" $name "* ]] || die "PARTS: there is no part '$name'; the parts are: $KNOWN"
done
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat_fp4}
dry=""
! switched_on DRY_RUN || dry=_dry_run
OUT=${OUT:-$NANOCHAT_BASE_DIR/measurements$dry}
if switched_on PLAN_ONLY; then
    PY=${PY:-python}
else
    if [ -n "${PY:-}" ]; then export PYTHONPATH=$ROOT:$ROOT/kernels${PYTHONPATH:+:$PYTHONPATH}; else setup_environment; fi
    switched_on DRY_RUN || "$PY" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        die "there is no GPU here to measure; DRY_RUN=1 tries all parts in small on any machine"
    mkdir -p "$OUT" || die "cannot create $OUT; set OUT to a writable folder"
fi

SUMMARY="" STATUSES="" FAILED=0
result() { # name, what became of it
    SUMMARY+=$(printf '%-15s %s' "$1" "$2")$'\n'
}
chosen() { [[ " $PARTS " == *" $1 "* ]]; }

# part NAME SECONDS COMMAND...: run it if it was chosen.
part() {
    local name=$1 limit=${LIMIT:-$2} started=$SECONDS status=0 last
    shift 2
    chosen "$name" || return 0
    if switched_on PLAN_ONLY; then
        echo "$name, at most $limit s:$(printf ' %q' "$@")"
        return 0
    fi
    echo "== $name:$(printf ' %q' "$@")"
    timeout -k 10 "$limit" "$@" >"$OUT/$name.log" 2>&1 || status=$?
    # Of steps the log has a table for each method, before it is timed, and after each round: the last one has them all.
    tail -n 60 "$OUT/$name.log" | cut -c1-200 | awk '/^ +variant/ { said = "" } { said = said $0 "\n" } END { printf "%s", said }'
    last=$(tail -n 1 "$OUT/$name.log" | cut -c1-150)
    case $status in
        0) result "$name" "ok, $((SECONDS - started)) s: $last" ;;
        124 | 137) result "$name" "FAILED, cut off after $limit s: $last" ;;
        *) result "$name" "FAILED, exit status $status: $last" ;;
    esac
    STATUSES+=$name=$status,
    [ "$status" = 0 ] || FAILED=1
}
# Steps as a run trains them: the head of each method, windows, attention and CUDA graphs are base_train's defaults.
bench_steps=("$PY" -m lab.bench steps)
doctor=("$PY" -m nanochat_fp4.doctor)
layers=("$PY" -m lab.bench layers --passes forward+backward)
steps=("${bench_steps[@]}" --depth "$depth" --rounds 2 --no-table7)
if switched_on DRY_RUN; then
    layers+=(--models tiny --tokens 256 --seconds 0.01 --eager)
    steps=("${bench_steps[@]}" --depth 2 --head-dim 64 --seq-len 64 --vocab-size 256 --total-batch-size 256 --micro-batch 2 --rounds 1 --no-table7)
fi
part doctor "$doctor_limit" "${doctor[@]}"
part tests 1200 "$PY" -m pytest -q -p no:cacheprovider tests/kernels/test_*.py tests/nvfp4/test_native.py tests/nvfp4/test_gemm.py
part layers "$layers_limit" "${layers[@]}" --json "$OUT/layers.json"
part steps "$steps_limit" "${steps[@]}" --json "$OUT/steps.json"
part steps_32gib 800 "${bench_steps[@]}" --memory-cap 32GiB --recompute none,mlp --rounds 2 --no-table7 --json "$OUT/steps_32gib.json"
if [ -n "${NANOCHAT:-}" ]; then
    # Both projects have the same attention.
    part steps_nanochat 400 env NANOCHAT_ATTENTION=sdpa "${bench_steps[@]}" --window-pattern L --depth 20 --methods "" --micro-batch 16 --no-table7 --nanochat "$NANOCHAT" --json "$OUT/steps_nanochat.json"
elif chosen steps_nanochat; then
    result steps_nanochat "skipped: NANOCHAT is not set"
fi

if ! switched_on PLAN_ONLY; then echo "== summary, in $OUT"; fi
printf '%s' "$SUMMARY"
measured=()
for name in layers steps steps_32gib; do
    ! { chosen "$name" && ! switched_on PLAN_ONLY && [ -s "$OUT/$name.json" ]; } || measured+=("$OUT/$name.json")
done
if [ ${#measured[@]} -gt 0 ]; then
    echo "== beside published numbers"
    "$PY" -m lab.bench compare "${measured[@]}" --card "$OUT/my_card.json" --statuses "$STATUSES" | tee "$OUT/my_card.txt" || FAILED=1
    of_plan="with these speeds, which are of d$depth"
    ! switched_on DRY_RUN || of_plan="in a dry run${DEPTH:+ with DEPTH=$DEPTH}: it takes none of these speeds, which are of a tiny d2"
    if switched_on DRY_RUN || [ -s "$NANOCHAT_BASE_DIR/measurements/steps.json" ]; then
        echo "== the plan of a speedrun $of_plan"
        # A dry run may have a depth that this machine cannot train.
        env -u PARTS -u DRY_RUN "$PY" -m scripts.plan speedrun || switched_on DRY_RUN || FAILED=1
    fi
    if switched_on DRY_RUN; then
        echo "== DRY_RUN is set: these are no measurements, of a tiny d2. On a GPU: ${DEPTH:+DEPTH=$DEPTH }bash dev/measure.sh"
    else
        echo "== to send it: $OUT/my_card.json (numbers, versions, the names of GPU and methods; no path, no host name, no text"
        echo "   of yours) and the table in $OUT/my_card.txt, to the project's issues, with the form 'My card'"
    fi
fi
exit $FAILED
