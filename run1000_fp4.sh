#!/usr/bin/env bash
# The $1000 tier: d32, 1.9B parameters, 38B tokens; about 40 hours on 8 H100 in BF16. Same variables as speedrun_fp4.sh.
# Without a GPU the same stages run on a small model, to see that they do.
#
#     PLAN_ONLY=1 bash run1000_fp4.sh     print the plan and stop
#     bash run1000_fp4.sh
[ -n "${BASH_VERSION:-}" ] || { echo "error: type bash in the place of sh: bash $0" >&2; exit 2; }
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$ROOT"
source dev/setup.sh
only_variables "$@"
source dev/pipeline.sh
pipeline run1000
