# What speedrun_fp4.sh and run1000_fp4.sh share: the stages from text to report, each skipped when its result is there.
#
# Source it after dev/setup.sh, call `choose NAME=default ...` for every number of the run, then `pipeline`.
# A variable of the same name in the environment overrides a default. QAT_METHOD, COMPARE, STAGES, NPROC, PLAN_ONLY,
# DATA_DIR, WANDB_RUN, NANOCHAT_BASE_DIR: see speedrun_fp4.sh.

only_variables "$@"

# The scripts work in $ROOT. Relative folders are relative to the caller's.
for name in NANOCHAT_BASE_DIR DATA_DIR; do
    if [[ -n "${!name:-}" && "${!name}" != /* && "${OLDPWD:-$ROOT}" != "$ROOT" ]]; then
        printf -v "$name" '%s/%s' "$OLDPWD" "${!name}"
    fi
done

# A shell that is not interactive starts background commands with SIGINT ignored, and bash can never trap a signal that
# was ignored at its start: kill -INT would not reach the stages. So the script starts again, with SIGINT not ignored.
if [ -n "$(trap -p INT | grep "''")" ] && [ -f "$ROOT/$(basename "$0")" ]; then
    python=$(find_python) || exit $?
    exec "$python" -c 'import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])' "$BASH" "$ROOT/$(basename "$0")" "$@"
fi

GO_ON="; the same command again goes on from here"
STEPS_WHY=""   # why NUM_ITERATIONS is what it is, where it was chosen by time
CPU_MINUTES="" # how long the whole run may take on a CPU; empty where NUM_ITERATIONS is not chosen by time
CHOSEN=()     # names, in the order they are printed
CONFIG=""     # what makes two runs different runs
DEFAULTS=""   # the same, had nothing been overridden
A_NUMBER='^-?[0-9]*\.?[0-9]+([eE]-?[0-9]+)?$'
AN_INTEGER='^-?[0-9]+$'

# choose NAME=default...: set each variable that is not set.
choose() {
    local pair name
    for pair in "$@"; do
        name=${pair%%=*}
        CHOSEN+=("$name")
        [ -n "${!name:-}" ] || printf -v "$name" '%s' "${pair#*=}"
        [[ ! "${pair#*=}" =~ $A_NUMBER || "${!name}" =~ $A_NUMBER || "$name=${!name}" = DEVICE_BATCH=auto ]] ||
            die "$name=${!name}: expected a number, such as the default ${pair#*=}; set another one or leave $name out"
        if [ "$name" != DATA_RATIO ] && [[ "${pair#*=}" =~ $AN_INTEGER && ! "${!name}" =~ $AN_INTEGER ]]; then
            [ "$name=${!name}" = DEVICE_BATCH=auto ] ||
                die "$name=${!name}: expected a whole number, such as the default ${pair#*=}; set one or leave $name out"
        fi
        case $name in
        # How often something is measured or saved does not make another run.
        # Nor do the later stages make another base model.
        EVAL_EVERY | EVAL_TOKENS | SPLIT_TOKENS | SAMPLE_EVERY | SAVE_EVERY | DEVICE_BATCH | EVAL_BATCH | CORE_EVERY) ;;
        MID_ARGS | SFT_ARGS | EVAL_ARGS | CORE_ARGS) ;;
        *)
            CONFIG+="$name=${!name} "
            DEFAULTS+="$pair "
            ;;
        esac
        printf -v "DEFAULT_OF_$name" '%s' "${pair#*=}"
    done
}

# What the small models that a CPU trains have in common. base_train lowers learning rates by sqrt(batch / 2^19), which is
# too careful for a few hundred steps; these are nanochat's, with that undone.
choose_for_a_cpu() { # MINUTES STEPS: at most STEPS, so that the whole run takes about so many minutes
    [ -n "${NUM_ITERATIONS:-}" ] || CPU_MINUTES=$1
    choose NUM_ITERATIONS="$2"
    choose HEAD_DIM=64 SEQ_LEN=256 WINDOW_PATTERN=L VOCAB_SIZE=4096 \
        DATA_RATIO=-1 TOTAL_BATCH=2048 DEVICE_BATCH=8 SEED=42 \
        MATRIX_LR=0.32 EMBEDDING_LR=4.8 UNEMBEDDING_LR=0.064 \
        NUM_SHARDS=2 TOK_SHARDS=2 TOK_CHARS=10000000 \
        EVAL_EVERY=40 EVAL_TOKENS=16384 SAMPLE_EVERY=-1 CORE_EVERY=-1 SAVE_EVERY=20 \
        EVAL_BATCH=8 SPLIT_TOKENS=65536 \
        MID_ARGS="--data=local --device-batch-size=8 --total-batch-size=2048 --eval-tokens=8192 --num-iterations=60" \
        SFT_ARGS="--data=local --num-iterations=20 --eval-steps=4 --eval-metrics-every=-1" \
        EVAL_ARGS="--task-name=local --max-problems=32 --max-new-tokens=32"
}

# On a CPU, unless NUM_ITERATIONS was set: as many steps as this machine has the time for now. A probe chooses them once
# for a base directory (nanochat_fp4/training/cpu_steps.py). Evaluations, mid-training and SFT shrink in proportion.
choose_steps() { # METHOD
    local answer="" share
    [ -n "$CPU_MINUTES" ] || return 0
    if [ "${PLAN_ONLY:-0}" = 0 ] && has_stage base || [ -s "$NANOCHAT_BASE_DIR/cpu_steps.json" ]; then
        answer=$(probe_steps "$1") || exit $?
    fi
    if [ -z "$answer" ]; then
        STEPS_WHY="a probe before training may choose half or a quarter of them"
        return
    fi
    STEPS_WHY=${answer#* }
    share=$((NUM_ITERATIONS / ${answer%% *}))
    CONFIG=${CONFIG/NUM_ITERATIONS=$NUM_ITERATIONS /NUM_ITERATIONS=${answer%% *} }
    NUM_ITERATIONS=${answer%% *}
    instead SPLIT_TOKENS "$((DEFAULT_OF_SPLIT_TOKENS / share))"
    instead MID_ARGS "${DEFAULT_OF_MID_ARGS/iterations=60/iterations=$((60 / share))}"
    instead SFT_ARGS "${DEFAULT_OF_SFT_ARGS/iterations=20/iterations=$((20 / share))}"
    instead EVAL_ARGS "${DEFAULT_OF_EVAL_ARGS/problems=32/problems=$((32 / share))}"
}

# On a GPU too small for the default depth, the deepest model that fits.
choose_depth() {
    local depth
    [ "$NUM_GPUS" -gt 0 ] && [ "$NPROC" -eq 1 ] && FITS=$(fits) || return 0
    depth=$(sed -n '1s/.*; d\([0-9]*\) fits$/\1/p' <<<"$FITS")
    [ -n "$depth" ] && [ "$DEPTH" = "$DEFAULT_OF_DEPTH" ] || return 0
    CONFIG=${CONFIG/DEPTH=$DEPTH /DEPTH=$depth } DEFAULTS=${DEFAULTS/DEPTH=$DEPTH /DEPTH=$depth }
    instead DEPTH "$depth"
    FITS="$(fits)"$'\n'"${FITS%%$'\n'*}, so DEPTH=$DEPTH"
}

instead() { # NAME DEFAULT: another default, and the variable's value unless it was set
    local default=DEFAULT_OF_$1
    if [ "${!1}" = "${!default}" ]; then printf -v "$1" '%s' "$2"; fi
    printf -v "$default" '%s' "$2"
}

probe_steps() { # METHOD; a plan only looks at what was chosen before
    local look=()
    [ "${PLAN_ONLY:-0}" = 0 ] && has_stage base || look=(--look)
    "$PY" -m nanochat_fp4.training.cpu_steps --method="$1" --minutes="$CPU_MINUTES" --steps="$NUM_ITERATIONS" \
        --depth="$DEPTH" --aspect-ratio="$ASPECT_RATIO" --head-dim="$HEAD_DIM" --max-seq-len="$SEQ_LEN" \
        --vocab-size="$VOCAB_SIZE" --device-batch-size="$DEVICE_BATCH" --total-batch-size="$TOTAL_BATCH" \
        ${look[@]+"${look[@]}"}
}

# A variable that nearly has one of our names would be ignored without a word: DETPH=6, or NUM_ITERATION=3.
check_names() {
    compgen -e | "$(find_python)" -c '
import difflib
import sys

ours = sys.argv[1:]
for name in sorted(set(sys.stdin.read().split()) - set(ours)):
    alike = difflib.get_close_matches(name, ours, n=1, cutoff=0.85) or [o for o in ours if sorted(o) == sorted(name)]
    if alike:
        sys.exit(f"error: {name} is set, and there is no such variable here; did you mean {alike[0]}? Unset {name} if not")
' "${CHOSEN[@]}" QAT_METHOD COMPARE NANOCHAT_BASE_DIR DATA_DIR WANDB_RUN TRACKER NPROC STAGES PLAN_ONLY GPU \
        BASE_ARGS MID_ARGS SFT_ARGS EVAL_ARGS CORE_ARGS VENV PYTHON PYTHONPATH PIP_TORCH_ARGS || exit 2
}

say() { printf '\n== %s\n' "$*"; }

print_plan() { # TITLE TAG...
    local name default
    echo "nanochat_fp4: $1"
    echo "  machine   $MACHINE"
    echo "  methods   ${METHODS[*]}   (QAT_METHOD=$QAT_METHOD; COMPARE=1 adds the bf16 baseline)"
    echo "  runs      ${*:2}"
    echo "  stages    $STAGES"
    echo "  folder    $NANOCHAT_BASE_DIR   (NANOCHAT_BASE_DIR)"
    echo "  numbers, each a variable that can be set:"
    for name in "${CHOSEN[@]}"; do
        [[ "${!name}" == *" "* ]] && echo "$name=\"${!name}\"" || echo "$name=${!name}"
    done | fold_lines
    [ -z "$STEPS_WHY" ] || echo "  chosen for a CPU: NUM_ITERATIONS=$NUM_ITERATIONS ($STEPS_WHY); set it to have another number"
    for name in "${CHOSEN[@]}"; do
        default="DEFAULT_OF_$name"
        if [ "$name" = NUM_ITERATIONS ] && [ -n "$STEPS_WHY" ]; then continue; fi
        [ "${!name}" = "${!default}" ] || echo "  set by you: $name=${!name} (default: ${!default:-none})"
    done
}

# How long the run will take on one GPU, this one or GPU=rtx5090: predicted, where there are numbers for it. The
# micro-batch is DEVICE_BATCH, or with auto the one of the memory by count.
print_estimate() {
    local tokens=0 saves=0 rows=$DEVICE_BATCH micro_batch=8192 lines ratio=()
    [ -n "${GPU:-}" ] || { [ "$NUM_GPUS" -gt 0 ] && [ "$NPROC" -eq 1 ]; } || return 0
    ! [[ $SAVE_EVERY =~ ^[0-9]+$ ]] || saves=$((SAVE_EVERY * TOTAL_BATCH))
    [ "$NUM_ITERATIONS" -lt 0 ] || tokens=$((NUM_ITERATIONS * TOTAL_BATCH))
    [ "$rows" != auto ] || rows=$(sed -n '1s/.*GiB: \([0-9]*\) row.*/\1/p' <<<"$FITS")
    [ -z "$rows" ] || micro_batch=$((rows * SEQ_LEN))
    [[ $DATA_RATIO = -* ]] || ratio=(--ratio "$DATA_RATIO")
    if ! lines=$("$PY" -m nanochat_fp4.step_time --gpu "${GPU:-}" --depth "$DEPTH" --tokens "$tokens" \
        --micro-batch "$micro_batch" ${ratio[@]+"${ratio[@]}"} --shards "$NUM_SHARDS" \
        --eval-every "$((EVAL_EVERY * TOTAL_BATCH))" --eval-tokens "$EVAL_TOKENS" --save-every "$saves" \
        --methods "$(IFS=, && echo "${METHODS[*]}")" 2>&1); then
        [[ -z ${GPU:-} || $lines != "error: --gpu: "* ]] || die "GPU=$GPU: ${lines#error: --gpu: }"
        [ -z "${GPU:-}" ] || die "${lines#error: }"
        lines="" # of this machine's GPU nothing may be known
    fi
    [ -z "$lines" ] || sed '1!s/^/    /' <<<"  predicted time of the base training on one GPU, without mid-training, SFT and benchmarks (python -m nanochat_fp4.step_time):"$'\n'"$lines"
    [ -z "$FITS" ] || sed '1!s/^/    /' <<<"  memory by count, SEQ_LEN=2048 (python -m nanochat_fp4.training.fits); base_train gets the first line's flags:"$'\n'"$FITS"
}

# What fits this GPU, or GPU=rtx5090. FLAG... as nanochat_fp4.training.fits has them.
fits() {
    [ "$ASPECT_RATIO$SEQ_LEN$HEAD_DIM" = 642048128 ] || return 0
    "$PY" -m nanochat_fp4.training.fits --this ${GPU:+--gpu "$GPU"} --depth "$DEPTH" "$@" 2>/dev/null
}

# Short items side by side, long ones on a line of their own.
fold_lines() {
    awk '{ if (line != "" && length(line) + length($0) > 100) { print "    " line; line = "" }
           line = line (line == "" ? "" : "  ") $0 } END { print "    " line }'
}

# run COMMAND...: awaited (dev/setup.sh), so that a signal to this script reaches the stage, which saves and stops.
run() {
    local status=0
    "$@" &
    await $! || status=$?
    [ -z "$STOPPED" ] || stop
    if [ "$status" -gt 0 ] && [ "$status" -lt 128 ] && [ "${MAY_BE_MISSING:-0}" != 0 ]; then
        echo "going on without it"
        return
    fi
    # 2 is bad input, explained by the stage in one line.
    if [ "$status" -ne 0 ] && [ "$status" -ne 2 ]; then
        echo "stopped (exit status $status)$GO_ON" >&2
    fi
    [ "$status" -eq 0 ] || exit "$status"
}

# on_devices MODULE ARGS...: the stage in one process, or in one for each GPU.
on_devices() {
    local nohup=() # torchrun stops at a SIGHUP, also where nohup has it ignored, unless it is told which signals to handle
    [ -z "$(trap -p HUP | grep "''")" ] || nohup=(--signals-to-handle=SIGTERM,SIGINT,SIGQUIT)
    if [ "$NPROC" -gt 1 ]; then
        run "$PY" -m torch.distributed.run ${nohup[@]+"${nohup[@]}"} --standalone --nproc_per_node="$NPROC" -m "$@"
    else
        run "$PY" -m "$@"
    fi
}

newer() { [ -s "$1" ] && [ "$1" -nt "$2" ]; }

newest_checkpoint() { # of a folder; the folder itself where there is none
    local newest
    newest=$(find "$1" -name 'meta_*.json' 2>/dev/null | sort | tail -n 1)
    echo "${newest:-$1}"
}

tokenizer_vocab_size() { # without importing torch; base_train checks the file
    "$PY" -c 'import json, sys; t = json.load(open(sys.argv[1])); print(len(t["tokens"]) + len(t["special_tokens"]))' \
        "$NANOCHAT_BASE_DIR/tokenizer/tokenizer.json" 2>/dev/null
}

stage_tok() {
    local folder=$NANOCHAT_BASE_DIR/tokenizer size download=""
    if [ -s "$folder/tokenizer.json" ] && [ -s "$folder/token_bytes.pt" ]; then
        size=$(tokenizer_vocab_size) || size=unreadable
        # A small text may yield fewer tokens than were asked for.
        if [ "$size" = "$VOCAB_SIZE" ] ||
            grep -qsE "\"vocab_size\": $VOCAB_SIZE,?\$" "$NANOCHAT_BASE_DIR/report/tokenizer-training.json"; then
            say "tokenizer: reusing $folder ($size tokens)"
            data_ready
            return
        fi
        die "$folder holds a tokenizer of $size tokens, this run wants $VOCAB_SIZE; set VOCAB_SIZE=$size, or choose another NANOCHAT_BASE_DIR"
    fi
    say "tokenizer: $VOCAB_SIZE tokens"
    run "$PY" -m nanochat_fp4.data.dataset --ensure -n "$TOK_SHARDS"
    if downloads; then
        "$PY" -m nanochat_fp4.data.dataset -n "$NUM_SHARDS" >"$NANOCHAT_BASE_DIR/download.log" 2>&1 &
        download=$!
        echo "downloading the rest of $NUM_SHARDS shards in the background (log: $NANOCHAT_BASE_DIR/download.log)"
    fi
    run "$PY" -m scripts.tok_train --max-chars="$TOK_CHARS" --vocab-size="$VOCAB_SIZE"
    # GPT-2's and GPT-4's tokenizers, to compare with, come from the network as well.
    if downloads; then run "$PY" -m scripts.tok_eval; else run "$PY" -m scripts.tok_eval --no-compare; fi
    if [ -n "$download" ]; then
        echo "waiting for the download"
        await "$download" || [ -n "$STOPPED" ] ||
            die "the download stopped; see $NANOCHAT_BASE_DIR/download.log, then run the same command again"
        [ -z "$STOPPED" ] || stop
    fi
}

# Whether FineWeb-Edu comes from the hub: not with a folder of one's own, and not where the hub could not be reached.
downloads() { [ -z "${DATA_DIR:-}" ] && compgen -G "$NANOCHAT_BASE_DIR/base_data/*.parquet" >/dev/null; }

data_ready() {
    downloads || return 0
    run "$PY" -m nanochat_fp4.data.dataset -n "$NUM_SHARDS"
}

stage_base() { # METHOD TAG
    local out=$NANOCHAT_BASE_DIR/base_checkpoints/$2
    if newer "$NANOCHAT_BASE_DIR/report/$2/base-model-training.json" "$(newest_checkpoint "$out")"; then
        say "base training, $1: reusing $out"
        return
    fi
    say "base training, $1"
    # shellcheck disable=SC2086  # BASE_ARGS holds several arguments
    on_devices scripts.base_train --method="$1" --model-tag="$2" --depth="$DEPTH" --aspect-ratio="$ASPECT_RATIO" \
        --head-dim="$HEAD_DIM" --max-seq-len="$SEQ_LEN" --window-pattern="$WINDOW_PATTERN" \
        --num-iterations="$NUM_ITERATIONS" --target-param-data-ratio="$DATA_RATIO" --total-batch-size="$TOTAL_BATCH" \
        --matrix-lr="$MATRIX_LR" --embedding-lr="$EMBEDDING_LR" --unembedding-lr="$UNEMBEDDING_LR" \
        --device-batch-size="$DEVICE_BATCH" --eval-every="$EVAL_EVERY" --eval-tokens="$EVAL_TOKENS" \
        --sample-every="$SAMPLE_EVERY" --core-metric-every="$CORE_EVERY" --save-every="$SAVE_EVERY" --seed="$SEED" \
        --resume-from-step=latest $([ "$NUM_GPUS" -eq 0 ] || fits --flags) ${BASE_ARGS:-}
}

stage_loss() { # METHOD TAG
    local checkpoint
    checkpoint=$(newest_checkpoint "$NANOCHAT_BASE_DIR/base_checkpoints/$2")
    if newer "$NANOCHAT_BASE_DIR/report/$2/base-model-loss.json" "$checkpoint"; then
        say "base loss, $1: measured before"
        return
    fi
    say "base loss, $1"
    on_devices scripts.base_loss --model-tag="$2" --device-batch-size="$EVAL_BATCH" --split-tokens="$SPLIT_TOKENS"
}

# after_training SECTION SOURCE TAG WHAT MODULE ARGS...: a later stage, skipped when its section of the report is newer
# than the checkpoint it starts from.
after_training() {
    local section=$1 source=$2 tag=$3 what=$4
    shift 4
    if newer "$NANOCHAT_BASE_DIR/report/$tag/$section.json" "$(newest_checkpoint "$NANOCHAT_BASE_DIR/$source/$tag")"; then
        say "$what: done before"
        return
    fi
    say "$what"
    on_devices "$@"
}

# shellcheck disable=SC2086  # CORE_ARGS, MID_ARGS, SFT_ARGS and EVAL_ARGS hold several arguments
stage_core() { # METHOD TAG
    # Its tasks come from the network; without them the rest of the run is still worth having.
    MAY_BE_MISSING=1 after_training base-model-evaluation base_checkpoints "$2" "CORE metric, $1" \
        scripts.base_eval --model-tag="$2" ${CORE_ARGS:-}
}

# shellcheck disable=SC2086
stage_mid() {
    after_training midtraining base_checkpoints "$2" "midtraining, $1" \
        scripts.mid_train --model-tag="$2" --resume-from-step=latest ${MID_ARGS:-}
    after_training chat-evaluation-mid mid_checkpoints "$2" "evaluation after midtraining, $1" \
        scripts.chat_eval -i mid -g "$2" ${EVAL_ARGS:-}
}

# shellcheck disable=SC2086
stage_sft() {
    after_training chat-sft mid_checkpoints "$2" "SFT, $1" \
        scripts.chat_sft --model-tag="$2" --resume-from-step=latest ${SFT_ARGS:-}
    after_training chat-evaluation-sft chatsft_checkpoints "$2" "evaluation after SFT, $1" \
        scripts.chat_eval -i sft -g "$2" ${EVAL_ARGS:-}
}

stage_report() { # of every run in the folder, also of earlier ones
    say "report"
    run "$PY" -m nanochat_fp4.evaluation.report generate
}

default_stages() { [ "$NUM_GPUS" -eq 0 ] && echo "tok base loss mid sft report" || echo "tok base loss core mid sft report"; }

has_stage() { [[ " $STAGES " == *" $1 "* ]]; }

# The method's own name (quartet2 is clover), or one line that lists the known ones.
checked_method() {
    trap '' INT # in the subshell of $(...): see missing_modules
    "$PY" -c 'from nanochat_fp4.common import resolve_method; from nanochat_fp4.errors import run_main
run_main(lambda: print(resolve_method(None)))'
}

# What this run has that the defaults have not, for its name: _steps240_matrix-lr0.1. Numbers are told by name; a folder,
# and what does not fit into a name, by its beginning and a number that differs where the whole does.
differences() {
    local name default value text=""
    for name in "${CHOSEN[@]}" DATA_DIR BASE_ARGS; do
        default="DEFAULT_OF_$name"
        value=${!name:-}
        [[ " $CONFIG" == *" $name="* ]] && [ "$name" != DEPTH ] && [ "$value" != "${!default:-}" ] || continue
        case $name in
        NUM_ITERATIONS) name=steps ;;
        DATA_DIR) name=data- value=$(basename "$value" | cut -c 1-20)-$(printf '%s' "$value" | cksum | cut -c 1-4) ;;
        BASE_ARGS) name="" ;;
        *) name=$(tr 'A-Z_' 'a-z-' <<<"$name") ;;
        esac
        text+="_$name$value"
    done
    text=$(sed -e 's/--//g' -e 's/[^A-Za-z0-9._-]\{1,\}/-/g' <<<"$text")
    if [ ${#text} -gt 60 ]; then text=${text:0:50}-$(printf '%s' "$CONFIG" | cksum | cut -d ' ' -f 1); fi
    echo "$text"
}

# The name of the run with this method, after CONFIG and DEFAULTS are complete.
tag_of() { # METHOD
    [ "$CONFIG" = "$DEFAULTS" ] && echo "d${DEPTH}_$1" || echo "d${DEPTH}_$1$(differences)"
}

# pipeline TITLE: everything, after `choose`.
pipeline() {
    local method tags=() stage known="tok base loss core mid sft report"
    : "${QAT_METHOD:=clover}" "${COMPARE:=0}" "${WANDB_RUN:=dummy}" "${STAGES:=$(default_stages)}"
    export QAT_METHOD WANDB_RUN
    for stage in $STAGES; do
        [[ " $known " == *" $stage "* ]] || die "STAGES: there is no stage '$stage'; the stages are: $known"
    done
    check_names
    mkdir -p "$NANOCHAT_BASE_DIR" 2>/dev/null || die "cannot create $NANOCHAT_BASE_DIR; set NANOCHAT_BASE_DIR to a writable folder"
    setup_environment
    method=$(checked_method) || exit $?
    METHODS=("$method")
    choose_steps "$method"
    choose_depth
    if [ "$COMPARE" != 0 ] && [ "$method" != bf16 ]; then METHODS+=(bf16); fi
    CONFIG+="DATA_DIR=${DATA_DIR:-} BASE_ARGS=${BASE_ARGS:-}"
    DEFAULTS+="DATA_DIR= BASE_ARGS="
    for method in "${METHODS[@]}"; do tags+=("$(tag_of "$method")"); done
    print_plan "$1" "${tags[@]}"
    print_estimate
    [ "${PLAN_ONLY:-0}" = 0 ] || return 0

    ! has_stage tok || stage_tok
    for i in "${!METHODS[@]}"; do
        for stage in base loss core mid sft; do
            ! has_stage "$stage" || "stage_$stage" "${METHODS[$i]}" "${tags[$i]}"
        done
    done
    if has_stage sft; then
        echo "talk to it: $PY -m nanochat_fp4 chat_web --model-tag ${tags[0]}"
        echo "            (a page in your browser; chat_cli in this terminal)"
    fi
    ! has_stage report || stage_report
}

# Where everything goes, and on what machine we are.
export PYTHONUNBUFFERED=1 # or a log would have the lines of stdout long after those of stderr
export NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat}
NUM_GPUS=$(count_gpus)
if [ "$NUM_GPUS" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then # only these are for us; -1 and nothing mean none
    NUM_GPUS=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^[^-]') || true
fi
NPROC=${NPROC:-$((NUM_GPUS > 1 ? NUM_GPUS : 1))}
[[ $NPROC =~ ^[1-9][0-9]{0,3}$ ]] || die "NPROC='$NPROC' is not a number of processes; use 1, 2, ... or leave it out"
if [ -n "${GPU:-}" ]; then
    [ "${PLAN_ONLY:-0}" != 0 ] || die "GPU=$GPU is for plans of a machine that is not here; set PLAN_ONLY=1 as well"
    NUM_GPUS=1 NPROC=1
    MACHINE="1 x $GPU, 1 process(es); not this machine, a plan alone"
elif [ "$NUM_GPUS" -gt 0 ]; then
    MACHINE="$NUM_GPUS x $(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1), $NPROC process(es)"
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
else
    MACHINE="no GPU, $NPROC process(es)"
    # One thread. A second one that spins saves a third of the time on a quiet machine and takes ten times as long on a busy
    # one. A second one that sleeps is slower than one alone (dev/LOG.md, 2026-11-23).
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
fi
