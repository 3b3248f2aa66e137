#!/usr/bin/env bash
# From nothing to a comparison, on a CPU, in a few minutes: makes .venv, prepares the source of the Python standard library
# as a corpus, trains a small GPT with AdamW and with MARS-AdamW on the same batches, and lays the two side by side.
#
#   bash scripts/quickstart.sh [--key=value ...]     the keys go to both runs, for example --max_iters=200
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

runs=runs/quickstart
step() { printf '\n== %s\n' "$1"; }

step "1/4  environment"
prepare_environment requirements.txt
python=.venv/bin/python

step "2/4  corpus: the Python standard library, byte by byte, in data/stdlib"
$python data/prepare.py stdlib

if [ -e $runs ]; then
    earlier=$runs-before-$(date +%Y%m%d-%H%M%S)
    mv $runs "$earlier"
    printf '\nan earlier quickstart was moved to %s\n' "$earlier"
fi
step "3/4  training twice on the same batches: AdamW, then MARS-AdamW"
$python train.py configs/stdlib_adamw.py --device=cpu --out_dir=$runs/adamw "$@"
echo
$python train.py configs/stdlib_mars.py --device=cpu --out_dir=$runs/mars-adamw "$@"

step "4/4  comparison"
$python scripts/compare.py $runs/adamw $runs/mars-adamw
