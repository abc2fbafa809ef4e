# The one set-up behind speedrun_fp4.sh, run1000_fp4.sh and tests/run.sh: set ROOT, source it, call setup_environment.
# It leaves PYTHONPATH and $PY, the python to use. The first time it makes .venv and installs the pinned dependencies;
# afterwards it takes a fraction of a second. What can be set:
#
#   VENV=/path        an environment of your own: it is checked and used as it is, nothing is installed into it.
#                     A .venv that is a link, for example to another clone's, is such an environment
#   PYTHON=python3.12 the interpreter that makes .venv (3.10 to 3.14; the default is the first that is found)
#   PIP_TORCH_ARGS=   arguments for the installation of torch, e.g. an index with builds for your GPU

die() {
    echo "error: $*" >&2
    exit 2
}

switched_on() { # NAME of a variable that is a switch; as nanochat_fp4/cli.py has it
    case ${!1:-} in # bash 3.2 of macOS has no other way to ignore case without a program
    "" | 0 | [Nn][Oo] | [Ff][Aa][Ll][Ss][Ee]) return 1 ;;
    1 | [Yy][Ee][Ss] | [Tt][Rr][Uu][Ee]) return 0 ;;
    *) die "$1=${!1}: expected 1 (yes, true) or 0 (no, false); set it to one of these or unset it" ;;
    esac
}

print_help() { # the comment at the top of the script
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$(of_the_caller "$0")"
    exit 0
}

VARIABLES=$ROOT/nanochat_fp4/variables.py # An installed package has it elsewhere; there the plan itself looks.

only_variables() { # "$@" of a script that variables alone tell what to do
    local word command="bash $0"
    [ -f "$VARIABLES" ] || command="nanochat-fp4 $(basename "$0" _fp4.sh)"
    case "${1:-}" in -h | --help) print_help ;; esac
    for word; do
        [[ $word =~ ^[A-Za-z_]+= ]] ||
            die "$(basename "$0") takes no flags or arguments, and got '$*'; set variables in their place, such as DEPTH=4 for --depth=4: see --help"
    done
    [ $# = 0 ] || die "$* stands behind the name of the script, where it sets nothing; put it in front of ${command%% *}: $(printf '%q ' "$@")$command"
}

source "$ROOT/dev/signals.sh"

# Number of NVIDIA GPUs on this machine; 0 where there is none or no driver.
count_gpus() {
    local n
    n=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || true
    echo "${n:-0}"
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10 python}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    if [ -n "${PYTHON:-}" ]; then
        die "PYTHON=$PYTHON is not a Python 3.10 to 3.14; set it to one, or unset it"
    fi
    die "no Python 3.10 to 3.14 found; install one, or name it with PYTHON=/path/to/python3"
}

of_the_caller() { # PATH: a relative one is meant from the folder in which the script was started, ~ may be quoted
    local path=${1/#[~]\//"$HOME"/}
    if [[ "$path" = /* || "${OLDPWD:-$ROOT}" = "$ROOT" ]]; then echo "$path"; else echo "$OLDPWD/$path"; fi
}

known_variables() { # [measure]: before anything is installed, an unknown variable that is nearly a known one is refused
    [ ! -f "$VARIABLES" ] || "$(find_python)" "$VARIABLES" "$@" || exit 2
}

# quietly WHAT COMMAND...: run it with its output in $SETUP_LOG and a sign of life every 15 seconds.
quietly() {
    local what=$1 started=$SECONDS work beat status=0
    shift
    echo "setup: $what"
    "$@" >>"$SETUP_LOG" 2>&1 &
    work=$!
    (
        trap 'kill $!; exit' HUP TERM # the sleep
        # A signal that comes before this shell has its trap is lost, and then the end of the work ends it.
        while sleep 15 & wait $! && kill -0 "$work" 2>/dev/null; do
            echo "setup: ... still at it after $((SECONDS - started)) s"
        done
    ) &
    beat=$!
    await "$work" || status=$?
    kill "$beat" 2>/dev/null || true
    wait "$beat" 2>/dev/null || true
    [ -z "$STOPPED" ] || stop
    return $status
}

install_failed() {
    tail -n 5 "$SETUP_LOG" >&2
    die "could not install $1; the whole story is in $SETUP_LOG. Check the network, then run the same command again"
}

# The package index's default build of torch for Linux brings some 3 GB of CUDA libraries. Where there is no GPU to use
# them, uv knows where PyTorch keeps its CPU builds; where uv cannot reach them, the default build works as well.
install_torch() {
    local torch uv pip=("$PY" -m pip install --retries 3 --timeout 30 -c "$venv/constraints.txt")
    torch=$(grep -E '^torch==' "$venv/requirements.txt")
    if [ -n "${PIP_TORCH_ARGS:-}" ]; then
        # shellcheck disable=SC2086  # several words are meant
        quietly "installing $torch ($PIP_TORCH_ARGS)" "${pip[@]}" $PIP_TORCH_ARGS "$torch" || install_failed "$torch"
        return
    fi
    if [ "$(uname -s)" = Linux ] && [ "$flavour" = cpu ]; then
        uv=$(command -v uv || echo "$venv/bin/uv")
        if [ ! -x "$uv" ]; then
            quietly "fetching uv, which finds CPU builds of torch" "${pip[@]}" uv || uv=""
        fi
        if [ -n "$uv" ] && UV_HTTP_TIMEOUT=30 UV_HTTP_RETRIES=0 quietly "installing $torch for the CPU" \
            "$uv" pip install --python "$PY" --torch-backend=cpu "$torch" -c "$venv/constraints.txt"; then
            return
        fi
        echo "setup: PyTorch's index of CPU builds cannot be reached; pip takes the build that its own index has"
    fi
    quietly "installing $torch" "${pip[@]}" "$torch" || install_failed "$torch"
}

# What would stop a run on this GPU is said before anything is installed or downloaded.
check_driver() {
    local driver capability
    while IFS=', ' read -r driver capability; do
        if ! [[ $driver =~ ^[0-9]+\. ]] || [ "${driver%%.*}" -ge 580 ]; then continue; fi
        if [ "${capability%%.*}" -ge 10 ]; then
            die "the NVIDIA driver $driver is older than 580, and torch for it knows no Blackwell; install driver 580 or newer"
        fi
        [ -n "${PIP_TORCH_ARGS:-}" ] ||
            die "the NVIDIA driver $driver is older than 580, which torch's default build needs; install a newer one, or set PIP_TORCH_ARGS to PyTorch's index of CUDA 12.6 builds"
    done < <(nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null)
}

# cpu, gpu, or gpu_newer for a GPU that needs a newer pair of torch and Triton than the one that was measured: Triton
# before 3.7.1 may miss a fence on sm_10x (triton#10590), and torch before 2.13 was not built for a GB10 (sm_121).
kind_of_machine() {
    if [ "$(count_gpus)" = 0 ]; then
        echo cpu
    elif nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -qE '^(10\.|12\.1)'; then
        echo gpu_newer
    else
        echo gpu
    fi
}

pins() { # FILE: requirements.txt or constraints.txt, on a GPU with the measured pair
    if [ "$flavour" != gpu ]; then
        cat "$1"
    else
        cat requirements-gpu.txt
        grep -vE '^(torch|triton|setuptools|nvidia-|cuda-)' "$1"
    fi
}

check_compiler() { # Triton compiles its launchers; a plan compiles nothing
    ! switched_on PLAN_ONLY || return 0
    [ -n "${CC:-}" ] || command -v gcc clang >/dev/null ||
        die "Triton needs a C compiler and there is no gcc; install it (Debian, Ubuntu: sudo apt install gcc), or set CC"
    "$PY" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        die "Triton needs Python.h, which $PY has not; install its headers (Debian, Ubuntu: sudo apt install python3-dev)"
}

# A lock belongs to a file descriptor, which all children of this shell inherit, so it ends with the last of them. Python
# takes it, because macOS has no command for it: "$python" -c "$TAKE_LOCK" DESCRIPTOR [wait]
TAKE_LOCK='
import fcntl, sys
try:
    fcntl.flock(int(sys.argv[1]), fcntl.LOCK_EX | (0 if "wait" in sys.argv else fcntl.LOCK_NB))
except BlockingIOError:
    sys.exit(1)
except OSError:
    pass  # a file system without locks'

# Two commands of one clone must not install at once.
lock_installation() {
    local python
    python=$(find_python) || exit $?
    : 2>/dev/null >>"$ROOT/.venv.lock" || die "cannot write in $ROOT, where .venv is to be made; set VENV to an environment of yours"
    exec 9>>"$ROOT/.venv.lock"
    "$python" -c "$TAKE_LOCK" 9 && return
    echo "setup: another command is installing into .venv; waiting for its end"
    "$python" -c "$TAKE_LOCK" 9 wait &
    await $! || true
    [ -z "$STOPPED" ] || stop
}

setup_environment() {
    local venv flavour want stamp missing takes own=${VENV:-}
    local what=VENV=$own instead="unset VENV to have .venv made"
    flavour=$(kind_of_machine)
    export PYTHONPATH="$ROOT:$ROOT/kernels${PYTHONPATH:+:$PYTHONPATH}"
    unset PYTHONDONTWRITEBYTECODE # images set it; each process would compile all sources anew

    if [ -z "$own" ] && [ -L "$ROOT/.venv" ]; then
        own=$ROOT/.venv what=".venv is a link to $(readlink "$ROOT/.venv"), which"
        instead="remove the link to have .venv made"
    fi
    if [ -n "$own" ]; then
        PY=$own/bin/python
        [ -x "$PY" ] || die "$what has no bin/python; $instead"
        missing=$("$PY" dev/missing_modules.py)
        [ -z "$missing" ] || die "$what lacks: $missing; install them there, or $instead"
        [ "$flavour" = cpu ] || check_compiler
        return
    fi

    venv=$ROOT/.venv
    PY=$venv/bin/python
    SETUP_LOG=$venv/setup.log
    stamp=$venv/.installed # what was installed, on what kind of machine, for which folder
    want="$flavour $(cat requirements*.txt constraints.txt pyproject.toml | cksum) $ROOT"
    ! installed || return 0
    check_driver
    lock_installation
    if ! installed; then # another command may have installed while this one waited
        if switched_on PLAN_ONLY; then
            takes="some three minutes and 2 GB"
            [ "$flavour" = cpu ] || takes="some minutes, and 3 GB more for CUDA's libraries"
            echo "setup: first this clone is installed into .venv, once: $takes; the plan follows"
        fi
        install_everything
    fi
    exec 9>&-
}

# This function and the next one read the variables of setup_environment.
installed() {
    [ -x "$PY" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && [ -z "$("$PY" dev/missing_modules.py)" ]
}

install_everything() {
    local python file
    if ! "$PY" -c 'import pip' 2>/dev/null; then
        python=$(find_python) || exit $?
        echo "setup: making .venv with $("$python" --version 2>&1)"
        "$python" -m venv --clear "$venv" >/dev/null 2>&1 ||
            uv venv -q --clear --seed --python "$python" "$venv" 2>/dev/null ||
            die "cannot make a virtual environment in $venv; install python3-venv (or uv), or check the disk"
    fi
    [ "$flavour" = cpu ] || check_compiler
    : >"$SETUP_LOG"
    for file in requirements.txt constraints.txt; do pins "$file" >"$venv/$file"; done
    if [ -f "$stamp" ] && ! grep -q "^$flavour " "$stamp"; then
        "$PY" -m pip uninstall -qy torch >>"$SETUP_LOG" 2>&1 || true # the build for the other kind of machine
    fi
    rm -f "$stamp"
    install_torch
    quietly "installing the rest, pinned in constraints.txt" \
        "$PY" -m pip install --retries 3 --timeout 30 -r "$venv/requirements.txt" -c "$venv/constraints.txt" ||
        install_failed "the dependencies"
    quietly "installing nanochat_fp4 itself (editable)" \
        "$PY" -m pip install --no-deps --no-build-isolation -e . || install_failed nanochat_fp4
    echo "$want" >"$stamp"
}
