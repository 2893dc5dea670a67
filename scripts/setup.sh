#!/bin/sh
# Builds .venv from pyproject.toml. Quick when nothing changed; safe to run twice at once.
#
#   PYTHON=python3.12 scripts/setup.sh     another interpreter (>= 3.10)
#   TUNEKIT_SETUP_GPU=no|12|13             instead of asking the NVIDIA driver
set -eu
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 2; }

PYTHON=${PYTHON:-python3}
CPU_TORCH=torch==2.13.0
CPU_INDEX=https://download.pytorch.org/whl/cpu

# The CUDA major version of the driver of this machine's GPU; "no" without one.
gpu() {
    if [ -n "${TUNEKIT_SETUP_GPU:-}" ]; then
        echo "$TUNEKIT_SETUP_GPU"
    elif command -v nvidia-smi >/dev/null 2>&1 && timeout 20 nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
        major=$(timeout 20 nvidia-smi | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9]*\)\..*/\1/p' | head -n 1)
        echo "${major:-12}"
    else
        echo no
    fi
}

# What pip and the compiles need from the system: Python's venv and a C compiler to link with.
system_packages() {
    missing=
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || missing="$missing python3-venv"
    command -v cc >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 || missing="$missing gcc libc6-dev"
    [ -z "$missing" ] && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "installing$missing with apt-get"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing; } \
            >&2 || fail "apt-get could not install$missing"
    else
        fail "this machine lacks$missing: as root, apt-get install$missing"
    fi
}

# PyTorch's own index of CPU builds, where it answers within 4 seconds; PyPI's torch brings 3 GB of CUDA.
cpu_index() {
    timeout 4 "$PYTHON" -c "import urllib.request as u; u.urlopen('$CPU_INDEX/torch/', timeout=3).read(1)" 2>/dev/null &&
        printf -- '--extra-index-url %s' "$CPU_INDEX" || true
}

command -v "$PYTHON" >/dev/null 2>&1 || fail "no $PYTHON: install Python >= 3.10, or name one in PYTHON"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$PYTHON is $("$PYTHON" -V 2>&1); tunekit needs Python >= 3.10"

mkdir -p .tunekit
if command -v flock >/dev/null 2>&1; then
    exec 9>.tunekit/setup.lock
    flock -n 9 || { say "another set-up is running here, waiting for it"; flock 9; }
fi

GPU=$(gpu)
WANTED="$(cat pyproject.toml scripts/setup.sh | sha256sum | cut -c1-64) $("$PYTHON" -c 'import sys; print(sys.version)' |
    tr -d '\n') $PWD gpu=$GPU"
STAMP=.venv/tunekit-setup
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$WANTED" ] && [ -x .venv/bin/tunekit ]; then
    exit 0
fi

system_packages
started=$(date +%s)
# A venv of another Python, or one that was moved or half made, is made anew.
version='import sys; print(sys.version_info[:3], sys.prefix != sys.base_prefix)'
if [ "$(.venv/bin/python -c "$version" 2>/dev/null)" != "$("$PYTHON" -c "$version" | sed 's/False/True/')" ] ||
    ! grep -qF "$PWD/.venv" .venv/bin/pip 2>/dev/null; then
    say "making .venv with $("$PYTHON" -V 2>&1)"
    "$PYTHON" -m venv --clear .venv
fi
rm -f "$STAMP"
pip() { .venv/bin/python -m pip --quiet --quiet --disable-pip-version-check --no-input "$@" >&2; }

pip install --upgrade 'pip>=25.1' || fail "pip could not be brought to 25.1 (see above)"
case $GPU in
no)
    EXTRA=
    if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
        say "no NVIDIA GPU here: installing the CPU build $CPU_TORCH"
        pip install $(cpu_index) "$CPU_TORCH" || fail "pip could not install $CPU_TORCH (see above)"
    fi
    ;;
*)
    EXTRA=
    [ "$GPU" -ge 13 ] && EXTRA='[cu13]'
    say "an NVIDIA GPU with CUDA $GPU: installing torch with CUDA and nvidia-cutlass-dsl$EXTRA"
    ;;
esac
say "installing tunekit and what it needs"
pip install --editable ".$EXTRA" --group dev || fail "pip could not install tunekit (see above)"
printf '%s' "$WANTED" >"$STAMP"
say "done in $(($(date +%s) - started)) s"
