# What speedrun_fp4.sh and run1000_fp4.sh share: they run the stages of a plan, each skipped when its result is there.
#
# Source it after dev/setup.sh, then `pipeline speedrun`. The plan (python -m scripts.plan) reads the variables,
# prints its page, and writes a line for each stage, which calls `stage` here.

# A shell that is not interactive starts background commands with SIGINT ignored, and bash can never trap a signal that
# was ignored at its start: kill -INT would not reach the stages. So the script starts again, with SIGINT not ignored.
if [ -n "$(trap -p INT | grep "''")" ] && [ -f "$ROOT/$(basename "$0")" ]; then
    python=$(find_python) || exit $?
    cd "${OLDPWD:-$ROOT}" # where the script was started, because relative paths in variables are meant from there
    exec "$python" "$ROOT/dev/interruptible.py" "$BASH" "$ROOT/$(basename "$0")" "$@"
fi

GO_ON="; the same command again goes on from what is saved"
FAILED=" " # names of stages that have failed, or lack the output of one
STATUS=0   # of the first one
DOWNLOAD="" DOWNLOAD_NAME=""

say() { printf '\n== %s\n' "$*"; }

# Whether the section of the report is there, and no weights in the folder are newer.
done_before() { # SECTION SOURCE
    [ -s "$1" ] && [ -z "$(find "$2" -name '*.pt' -newer "$1" -print 2>/dev/null | head -n 1)" ]
}

leave_out() { # NAME LINE: for the report, and for the script's last lines
    FAILED+="$1 "
    echo "$2" >>"$NANOCHAT_BASE_DIR/report/left_out.txt"
}

# Whether a stage that this one needs has failed. Then this one is left out.
lacks() { # NAME NEEDS TITLE
    local need
    for need in $2; do
        [ -z "$DOWNLOAD" ] || [ "$need" != "$DOWNLOAD_NAME" ] || await_download
        [[ "$FAILED" == *" $need "* ]] || continue
        say "$3: left out, because ${need//:/ } has failed"
        leave_out "$1" "$3, because ${need//:/ } has failed. To have it: the same command again"
        return 0
    done
    return 1
}

failed() { # NAME TITLE STATUS
    [ "$STATUS" != 0 ] || STATUS=$3
    # 2 is bad input, explained by the stage in one line.
    [ "$3" = 2 ] || echo "$2 failed (exit status $3)$GO_ON" >&2
    leave_out "$1" "$2, because it failed (exit status $3). To have it: see its messages above, then the same command again"
}

# Awaited (dev/setup.sh), so that a signal to this script reaches the stage, which saves and stops.
run() {
    local status=0
    "$@" &
    await $! || status=$?
    [ -z "$STOPPED" ] || stop
    return $status
}

on_devices() { # PROCESSES MODULE FLAGS...
    local nohup=() # torchrun stops at a SIGHUP, also where nohup has it ignored, unless it is told which signals to handle
    [ -z "$(trap -p HUP | grep "''")" ] || nohup=(--signals-to-handle=SIGTERM,SIGINT,SIGQUIT)
    if [ "$1" -gt 1 ]; then
        run "$PY" -m torch.distributed.run ${nohup[@]+"${nohup[@]}"} --standalone --nproc_per_node="$1" -m "${@:2}"
    else
        run "$PY" -m "${@:2}"
    fi
}

# stage NAME NEEDS SECTION SOURCE TITLE PROCESSES MODULE FLAGS...: done before where the section of the report is newer
# than all weights in SOURCE.
stage() {
    local name=$1 title=$5 status=0
    ! lacks "$name" "$2" "$title" || return 0
    if [ -n "$3" ] && done_before "$NANOCHAT_BASE_DIR/$3" "$NANOCHAT_BASE_DIR/$4"; then
        say "$title: done before, $NANOCHAT_BASE_DIR/$3"
        return 0
    fi
    say "$title"
    on_devices "${@:6}" || status=$?
    [ "$status" = 0 ] || failed "$name" "$title" "$status"
}

# Like stage, for one whose end only those wait for that need it.
beside() {
    ! lacks "$1" "$2" "$5" || return 0
    "$PY" -m "${@:7}" >"$NANOCHAT_BASE_DIR/download.log" 2>&1 &
    DOWNLOAD=$! DOWNLOAD_NAME=$1
    echo "$5, in the background (log: $NANOCHAT_BASE_DIR/download.log)"
}

await_download() {
    local pid=$DOWNLOAD status=0
    DOWNLOAD=""
    echo "waiting for the download"
    await "$pid" || status=$?
    [ -z "$STOPPED" ] || stop
    [ "$status" = 0 ] || failed "$DOWNLOAD_NAME" "the download (see $NANOCHAT_BASE_DIR/download.log)" "$status"
}

# On a terminal, where the plan goes without something: a minute to say no.
ask() {
    local answer=""
    [ -s "$NANOCHAT_BASE_DIR/report/left_out.txt" ] && [ -t 0 ] && [ -t 1 ] || return 0
    read -r -t 60 -p "Go on without them? [Y/n; yes after 60 seconds] " answer || echo
    [[ "$answer" != [nN]* ]] || exit 2
}

# The list of what a run left out, and the calls of its plan, are files of the base directory. Two runs at once would
# write into each other's. A stage that outlived its script has the lock, too, so Linux names all who have it.
lock_base_dir() {
    local python lock=$NANOCHAT_BASE_DIR/.pipeline.lock pids
    python=$(find_python) || exit $?
    : 2>/dev/null >>"$lock" || die "cannot write in $NANOCHAT_BASE_DIR; set NANOCHAT_BASE_DIR to a writable folder"
    exec 8>>"$lock"
    if "$python" -c "$TAKE_LOCK" 8; then
        printf '%s' "process $$ on $(uname -n) since $(date '+%Y-%m-%d %H:%M:%S')" >"$lock.txt" # as locks.py has it
        return
    fi
    exec 8>&- # This script has opened it as well.
    pids=$(find -L /proc/[0-9]*/fd -samefile "$lock" 2>/dev/null | cut -d/ -f3 | sort -nu | tr '\n' ' ') || true
    die "another speedrun_fp4.sh or run1000_fp4.sh is at work in $NANOCHAT_BASE_DIR: $(cat "$lock.txt")${pids:+ (at work now: ${pids% })}; wait for its end, stop it, or set another NANOCHAT_BASE_DIR"
}

# pipeline RUN: the whole run.
pipeline() {
    local name files all=()
    known_variables
    if [ "${PLAN_ONLY:-}" = all ]; then # the plan with every number
        export PLAN_ONLY=1
        all=(--all)
    fi
    export NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat_fp4}
    for name in NANOCHAT_BASE_DIR DATA_DIR NANOCHAT_EVAL_DIR; do
        [ -z "${!name:-}" ] || export "$name=$(of_the_caller "${!name}")"
    done
    IFS=, read -ra files <<<"${RECIPES:-}"
    RECIPES=$(for name in ${files[@]+"${files[@]}"}; do printf '%s,' "$(of_the_caller "$name")"; done)
    export RECIPES=${RECIPES%,}
    # One thread. A second one that spins saves a third of the time on a quiet machine and takes ten times as long on a
    # busy one. A second one that sleeps is slower than one alone (dev/LOG.md, 2026-11-23).
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
    export PYTHONUNBUFFERED=1 # or a log would have the lines of stdout long after those of stderr
    setup_environment
    if switched_on PLAN_ONLY; then
        run "$PY" -m scripts.plan "$1" ${all[@]+"${all[@]}"} || exit $?
        return
    fi
    mkdir -p "$NANOCHAT_BASE_DIR/report" 2>/dev/null ||
        die "cannot create $NANOCHAT_BASE_DIR; set NANOCHAT_BASE_DIR to a writable folder"
    lock_base_dir
    NANOCHAT_BEGAN=$(date +%s) && export NANOCHAT_BEGAN # the report says how long all of it took
    : >"$NANOCHAT_BASE_DIR/report/said.txt" # what a stage has said, later ones do not repeat
    run "$PY" -m scripts.plan "$1" --calls "$NANOCHAT_BASE_DIR/report/calls.sh" || exit $?
    sed -n '1s/^#/, with/p' "$NANOCHAT_BASE_DIR/report/calls.sh" >>"$NANOCHAT_BASE_DIR/.pipeline.lock.txt"
    ask
    # shellcheck disable=SC1091  # the plan has just written it. bash reads the whole file before it runs the first line.
    source "$NANOCHAT_BASE_DIR/report/calls.sh"
    # The end of this script would end it.
    [ -z "$DOWNLOAD" ] || [ "$STATUS" != 0 ] || await_download
    [ ! -s "$NANOCHAT_BASE_DIR/report/left_out.txt" ] || sed 's/^/left out: /' "$NANOCHAT_BASE_DIR/report/left_out.txt"
    [ -n "${VENV:-}" ] || echo "these commands need, once in a shell: source $(printf %q "$ROOT/.venv/bin/activate")"
    exit "$STATUS"
}
