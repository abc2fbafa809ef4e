#!/usr/bin/env bash
# Lint, format check and tests, in the environment of dev/setup.sh, which the first call makes. Arguments go to pytest:
#
#     bash tests/run.sh                               all tests, about ten minutes on two cores
#     bash tests/run.sh tests/models -k "not llama"   some files or folders, some names
#     bash tests/run.sh -n 0 -s tests/test_files.py   in one process, with prints
#     bash tests/run.sh --slow                        also tests that take minutes
#     bash tests/run.sh --soak                        also many random faults, tens of minutes
#
# .venv/bin/python -m pytest --help prints all options of pytest.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
source dev/setup.sh

# pytest's own message of a path that is not there gets lost between the processes of pytest-xdist.
check_paths() {
    local word path before="" found
    for word in "$@"; do
        path=${word%%::*}
        # A word after an option can be its value, such as a file to write.
        if [[ "$word" != -* && ("$path" = *.py || ("$path" = */* && "$before" != -*)) && ! -e "$path" ]]; then
            found=$(find tests -name "$(basename "$path")" | head -n 1)
            die "there is no $path in $ROOT; ${found:+did you mean $found? }name a file or folder of it, or choose tests by -k NAME"
        fi
        before=$word
    done
}

limit=1200  # seconds in which a test ends on any machine
for word in "$@"; do
    case $word in
        -h | --help) print_help ;;
        --slow | --soak) limit=0 ;;
    esac
done
check_paths "$@"
setup_environment

"$PY" -m ruff check .
"$PY" -m ruff format --check . ||
    die "no test has run; type '$PY -m ruff format .' and this again, or '$PY -m pytest' for tests alone"
# `python -m pytest` puts the repository first on sys.path, as `python -m scripts.x` does: see tests/test_packaging.py.
# One process more than there are usable CPUs, for some tests wait, up to four (about 1 GB each), where pytest-xdist is
# installed; `-n 0` is one for all.
if "$PY" -c 'import xdist' 2>/dev/null; then
    set -- -n "$((1 + $("$PY" nanochat_fp4/hardware.py)))" --maxprocesses=4 --dist=worksteal "$@"
fi
# A test that waits for ever ends with the stacks of its threads, and takes its process with it.
if "$PY" -c 'import pytest_timeout' 2>/dev/null; then
    set -- --timeout="$limit" --timeout-method=thread "$@"
fi
"$PY" -m pytest "$@"
