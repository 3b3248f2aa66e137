#!/usr/bin/env bash
# Fetches all that training needs from the network, on a machine that has one: a cluster's login node, whose file system
# the compute nodes share. Everything after that runs without a network.
#
#   bash scripts/prefetch.sh                                  the Python environment, GPT-2's BPE files, OpenWebText
#   bash scripts/prefetch.sh fineweb_edu --workers 16         another data set: a command of data/prepare.py
#
# What is there already is not fetched again. A data set is turned into tokens here too, on as many cores as --workers
# says (all, unless given).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

[ $# -gt 0 ] || set -- openwebtext
prepare_environment requirements.txt
if [[ $1 != stdlib && " $* " != *" bytes "* ]]; then
    .venv/bin/python data/prepare.py tokenizer
fi
.venv/bin/python data/prepare.py "$@"
echo "ready; without a network: sbatch scripts/train.sbatch CONFIG.py, and wandb records offline (wandb sync sends it)"
