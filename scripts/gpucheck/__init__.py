"""The parts of scripts/gpu_check.sh: each runs commands of this repository on a GPU and keeps figures of them."""
