#!/usr/bin/env bash
# Fetches all that training and evaluation need from the network, on a machine that has one: a cluster's login node, whose
# file system the compute nodes share. Everything after that runs without a network.
#
#   bash scripts/prefetch.sh                                  the Python environment, GPT-2's BPE files, HellaSwag,
#                                                             OpenWebText
#   bash scripts/prefetch.sh fineweb_edu --workers 16         another data set: a command of data/prepare.py
#
# What is there already is not fetched again. A data set is turned into tokens here too, on as many cores as --workers
# says (all, unless given). HellaSwag is only for scripts/evaluate.py: without it the rest goes on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

case " $* " in *" -h "* | *" --help "*)
    sed -n '2,/^set/s/^# \{0,1\}//p' scripts/prefetch.sh
    exit 0
    ;;
esac
[ $# -gt 0 ] || set -- openwebtext
prepare_environment requirements.txt
missing=
if [[ $1 != stdlib && " $* " != *" --tokenizer"[\ =]"bytes "* ]]; then
    .venv/bin/python data/prepare.py tokenizer
    .venv/bin/python data/prepare.py hellaswag || missing=1
fi
.venv/bin/python data/prepare.py "$@"
if [ -n "$missing" ]; then
    echo "warning: HellaSwag is missing (the error above says why), so scripts/evaluate.py --hellaswag cannot run yet; to" \
        "fetch it later: .venv/bin/python data/prepare.py hellaswag" >&2
fi
echo "ready; without a network: sbatch scripts/train.sbatch CONFIG.py, and wandb records offline (wandb sync sends it)"
