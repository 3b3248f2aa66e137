#!/usr/bin/env bash
# Measures and checks on a machine with one NVIDIA GPU what cannot be on a CPU: benchmarks, a pair of GPT-2 small, exact
# resume, the tests marked gpu. Ends within the minutes given and writes one JSON (default: runs/gpu_check.json):
#
#   bash scripts/gpu_check.sh [--device cuda|cpu] [--minutes 8] [--parts NAME,NAME] [OUT.json]
#
# With PYTHON=/path/to/python in the environment that Python is used as it is; it needs requirements.txt and pytest.
# Otherwise .venv is made, where there is none yet, as scripts/test.sh makes it; that is not part of the minutes.
# --device cpu goes the same way with sizes of seconds, to try the script; its figures mean nothing.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if [ -z "${PYTHON:-}" ]; then
    (cd "$root" && source scripts/environment.sh && prepare_environment tests/requirements.txt)
fi
exec "${PYTHON:-$root/.venv/bin/python}" "$root/scripts/gpu_check.py" "$@"
