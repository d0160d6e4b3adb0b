#!/usr/bin/env bash
# Runs the example job and shows what came of it. demo.sh BINARY MODEL
set -euo pipefail
bin=$1 model=$2
out=build/demo/answers
rm -rf build/demo
mkdir -p build/demo

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
[ -t 1 ] || say() { printf '\n%s\n' "$*"; }

say "\$ millrace run examples/questions.jsonl -m $model -o $out.jsonl.zst"
"$bin" run examples/questions.jsonl -m "$model" -o "$out.jsonl.zst"

say "Three of the results (zstd -dc $out.jsonl.zst | head -n 3)"
zstd -dcq "$out.jsonl.zst" | head -n 3 | cut -c 1-600

say "The job is whole: millrace check $out.jsonl.zst"
"$bin" check "$out.jsonl.zst"

say "The report ($out.report.json; $out.report.html is the same with charts)"
python3 - "$out.report.json" <<'PY'
import json, sys
report = json.load(open(sys.argv[1]))
for key in ("rows", "rows_ok", "rows_failed", "prompt_tokens", "prefill_tokens_computed", "output_tokens", "seconds", "throughput", "ttft", "tpot", "mfu", "mbu"):
    if key in report:
        print(f"  {key:24} {json.dumps(report[key])}")
PY
