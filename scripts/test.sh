#!/usr/bin/env bash
# Checks the project: linter, formatter and type checker, then the tests that are not marked slow.
#
#   bash scripts/test.sh [pytest arguments]          everything but the slow tests, in under 5 minutes on 2 cores
#   bash scripts/test.sh --slow [pytest arguments]   the slow tests only
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

prepare_environment tests/requirements.txt
if [ "${1:-}" = --slow ]; then
    shift
    echo "== slow tests"
    exec .venv/bin/python -m pytest -m slow "$@"
fi
echo "== ruff"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
echo "== mypy"
.venv/bin/mypy
echo "== tests"
exec .venv/bin/python -m pytest -m "not slow" --numprocesses=2 --dist=loadfile "$@"
