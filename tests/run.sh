#!/usr/bin/env bash
# Lint, format check and tests, in the environment of dev/setup.sh. Arguments go to pytest: bash tests/run.sh -k gpt
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
source dev/setup.sh
setup_environment

"$PY" -m ruff check .
"$PY" -m ruff format --check .
# `python -m pytest` puts the repository first on sys.path, as `python -m scripts.x` does: see tests/test_packaging.py.
# One process more than there are usable CPUs, for some tests wait, up to four (about 1 GB each), where pytest-xdist is
# installed; `-n 0` is one for all.
if "$PY" -c 'import xdist' 2>/dev/null; then
    set -- -n "$((1 + $("$PY" nanochat_fp4/hardware.py)))" --maxprocesses=4 --dist=worksteal "$@"
fi
"$PY" -m pytest "$@"
