#!/usr/bin/env bash
# Runs the fuzz targets, one after the other: fuzz.sh SECONDS [NAME...] after `make fuzz`. Prints runs and new inputs of each.
# What is found grows in build/fuzz/corpus/NAME; a crash is left as build/fuzz/NAME-crash-...: mend it, and make it a seed
# in tests/fuzz/corpus/NAME, which every test run replays. BUILD names another build folder.
set -uo pipefail
cd "$(dirname "$0")/.."
seconds=${1:?usage: fuzz.sh SECONDS [NAME...]}
shift
dir=${BUILD:-build}/fuzz
if [ $# -eq 0 ]; then
  set -- $(basename -a tests/fuzz/fuzz_*.c | sed 's/^fuzz_//; s/\.c$//')
fi
work=$(mktemp -d -p "$([ -w /dev/shm ] && echo /dev/shm || echo /tmp)")
trap 'rm -rf "$work"' EXIT
export MR_FUZZ_DIR=$work
export ASAN_OPTIONS=allocator_may_return_null=1
bad=0
for name in "$@"; do
  mkdir -p "$dir/corpus/$name" "tests/fuzz/corpus/$name"
  dict=tests/fuzz/$name.dict
  "$dir/fuzz_$name" "$dir/corpus/$name" "tests/fuzz/corpus/$name" -max_total_time="$seconds" -max_len=20000 -timeout=20 \
    -rss_limit_mb=2500 -print_final_stats=1 -artifact_prefix="$dir/$name-" $([ -f "$dict" ] && echo "-dict=$dict") \
    >"$work/log" 2>&1
  rc=$?
  runs=$(sed -n 's/^stat::number_of_executed_units: //p' "$work/log")
  new=$(sed -n 's/^stat::new_units_added: *//p' "$work/log")
  echo "$name: ${runs:-?} runs, ${new:-?} new inputs, exit $rc"
  if [ $rc -ne 0 ]; then
    bad=1
    grep -aE '^==|ERROR|SUMMARY|runtime error|does not hold|Test unit written|^    #[0-9] ' "$work/log" | head -n 30
  fi
  rm -rf "${work:?}"/*
done
exit $bad
