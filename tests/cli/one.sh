#!/usr/bin/env bash
# One golden test: runs DIR/cmd in an empty folder and compares. one.sh BINARY DIR
# DIR holds cmd (a bash script; $MR is the binary, $T this folder, $MODEL the default model), and what it must give:
# exit (default 0), stdout, stderr (compared when the file is there; a line "~REGEX" matches by extended regex).
# A cmd that needs what is not there exits 77: counted as passed, with a word on it.
set -uo pipefail
MR=$(realpath "$1")
T=$(realpath "$2")
MODEL=$(realpath models/SmolLM2-135M-Instruct.Q4_1.gguf 2>/dev/null)
export MR T MODEL
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/run"
(cd "$work/run" && timeout 300 bash "$T/cmd" >"$work/stdout" 2>"$work/stderr" </dev/null)
rc=$?
if [ $rc -eq 77 ]; then
  echo "skipped: $(tail -n 1 "$work/stderr")"
  exit 0
fi
bad=0
want=$(cat "$T/exit" 2>/dev/null || echo 0)
if [ "$rc" != "$want" ]; then
  echo "exit $rc, expected $want"
  bad=1
fi
for stream in stdout stderr; do
  [ -f "$T/$stream" ] || continue
  python3 - "$T/$stream" "$work/$stream" <<'PY' || bad=1
import re, sys
want, have = (open(p, encoding="utf-8", errors="replace").read().splitlines() for p in sys.argv[1:])
for i in range(max(len(want), len(have))):
    w = want[i] if i < len(want) else None
    h = have[i] if i < len(have) else None
    if w is None or h is None or not (re.fullmatch(w[1:], h) if w.startswith("~") else w == h):
        print(f"{sys.argv[1]}:{i + 1}:\n  expected {w!r}\n  got      {h!r}")
        sys.exit(1)
PY
done
if [ $bad -ne 0 ]; then
  echo "--- stdout"; head -n 40 "$work/stdout"; echo "--- stderr"; head -n 40 "$work/stderr"
fi
exit $bad
