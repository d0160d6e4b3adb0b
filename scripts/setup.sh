#!/usr/bin/env bash
# Installs the Debian packages that are missing. setup.sh build|test|models|gpu [--quiet]
#   build: compiler and libraries   test: what the tests use besides   models: python3 with pip, to fetch weights
#   gpu: what makes AMD's kernels; optional. NVIDIA's need nvcc (CUDA 12.8 or later), which Debian does not have
set -euo pipefail

build="gcc g++ make pkg-config libc6-dev libzstd-dev libarchive-dev zlib1g-dev libjansson-dev libpcre2-dev libutf8proc-dev libxxhash-dev"
test="$build libcmocka-dev clang libclang-rt-14-dev zstd python3 valgrind"
models="python3 python3-pip"
gpu="clang-19 lld-19"

what=${1:-build}
quiet=${2:-}
# Not Debian: the compiler says what is missing.
command -v dpkg-query >/dev/null || exit 0
missing=()
for package in ${!what}; do
  dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
# A python3 with pip that did not come from Debian does as well.
if [ "$what" = models ] && python3 -m pip --version >/dev/null 2>&1; then
  missing=()
fi
if [ ${#missing[@]} -eq 0 ]; then
  [ -n "$quiet" ] || echo "nothing to install"
  exit 0
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo >/dev/null; then
    echo "setup: these packages are missing, and neither root nor sudo is at hand: ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
echo "setup: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
