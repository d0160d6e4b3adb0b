#!/usr/bin/env bash
# A small job under memcheck: no error, no leak. valgrind.sh BINARY
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
model=models/SmolLM2-135M-Instruct.Q4_1.gguf
printf '%s\n' '{"prompt": "One, two,", "max_tokens": 2, "temperature": 0}' 'not json' >"$work/in.jsonl"
rc=0
MILLRACE_ISA=avx2 valgrind --quiet --leak-check=full --errors-for-leak-kinds=definite --error-exitcode=99 \
  "$1" run "$work/in.jsonl" -m "$model" -o "$work/out.jsonl" --threads 1 --progress none || rc=$?
[ $rc -eq 1 ] && [ "$(wc -l <"$work/out.jsonl")" -eq 1 ]
