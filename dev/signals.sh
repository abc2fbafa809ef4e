# How dev/setup.sh and dev/pipeline.sh act on signals, and await what they run.
#
# bash acts on a signal only after its foreground command has ended. So a long command runs in the background and is
# awaited. A signal is passed on to every background command. The script ends when the awaited one has ended.
STOPPED="" # the exit status that the first signal asks for
AWAITED="" # a process id
INTERRUPTED=""

pass_on() { # SIGNAL STATUS
    : "${STOPPED:=$2}"
    INTERRUPTED=1
    signal_jobs "$1"
    [ -n "$AWAITED" ] || stop
}

signal_jobs() { # SIGNAL
    local pid
    for pid in $(jobs -pr); do kill -"$1" "$pid" 2>/dev/null || true; done
}

stop() {
    local name
    name=SIG$(kill -l $((STOPPED - 128)))
    [ "$name" != SIGINT ] || name="Ctrl-C (SIGINT)"
    # The terminal may be closed. Then the line cannot be written.
    echo "stopped by $name (exit status $STOPPED)${GO_ON:-}" >&2 || true
    exit "$STOPPED"
}

# await PID: returns its exit status. A signal does not end the wait.
await() {
    local status
    AWAITED=$1
    while :; do
        status=0 INTERRUPTED=""
        wait "$1" 2>/dev/null || status=$?
        [ -n "$INTERRUPTED" ] || break
    done
    AWAITED=""
    return "$status"
}

trap 'pass_on HUP 129' HUP   # has no effect under nohup, as it should
trap 'pass_on TERM 130' INT  # bash starts background commands with SIGINT ignored
trap 'pass_on TERM 143' TERM
trap 'signal_jobs TERM; wait 2>/dev/null || true' EXIT # nothing outlives the script
