# shellcheck shell=bash
# Sourced by the other scripts: the checkout's own Python environment.
#
#   prepare_environment FILE    makes .venv in the checkout if there is none, and installs what the requirements FILE
#                               lists. What was installed is remembered, so that a second start installs nothing.

prepare_environment() {
    local requirements=$1 base
    if [ ! -x .venv/bin/python ]; then
        base=$(find_python) || return 1
        echo "making .venv with $("$base" --version)"
        if ! "$base" -m venv .venv; then
            rm -rf .venv
            echo "error: $base cannot make an environment; on Debian and Ubuntu: apt install python3-venv" >&2
            return 1
        fi
    fi
    if [ ! -e "$(installed "$requirements")" ]; then
        echo "installing $requirements into .venv (minutes when PyTorch has to be fetched)"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$requirements" || return 1
        # What the tests need includes what everything else needs.
        touch "$(installed requirements.txt)" "$(installed "$requirements")"
    fi
}

# The file that says that a requirements file, with its present content, was installed.
installed() {
    echo ".venv/installed-$(cat requirements.txt "$1" | cksum | tr ' ' '-')"
}

# The first Python on the PATH that is new enough.
find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11 python3.10 python; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$name"
            return 0
        fi
    done
    echo "error: no Python 3.10 or newer on the PATH" >&2
    return 1
}
