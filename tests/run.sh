#!/usr/bin/env bash
# Runs suites and counts tests. tests/run.sh BUILD SUITE...; the last line is "N passed, N failed, N skipped".
#   unit      every unit test program            isa        the numeric ones on every instruction set of this CPU
#   cli       golden command-line tests          tidy       style and layout of the sources
#   clang     the whole tree builds with clang   asan       a bounded share of unit, address and UB sanitizers
#   asan-all  all of unit, the same              tsan       the threaded ones, thread sanitizer
#   valgrind  one small job under memcheck       cron       a crontab line through a real cron daemon (root, a minute)
#   slurm     an array on a single-node Slurm    stop       signals, two runs, closed files, full disks, real runs
#   kill      kill -9 at random times, 30 times  kill-long  1,000 times
#   crash     crashes and faults, 100 outcomes at each point (unit tries a few)
#   memory    peak memory at two sizes of a job         memory-long  up to 10 million rows, half an hour
#   systemd   the timer and service of examples/cron under a real systemd of its own (root)
#   mutants   faults planted into the GPU's kernels are found (a minute)
#   device-check  the script that checks a GPU, on the emulated one with a tiny model
#   fuzz-replay  the corpus of every fuzz target, sanitized
set -uo pipefail
cd "$(dirname "$0")/.."
build=$1
shift
passed=0 failed=0 skipped=0
export MILLRACE_CACHE= # no test learns from another
log=$(mktemp)
trap 'rm -f "$log"' EXIT

result() { # name rc: counts one plain check
  if [ "$2" -eq 0 ]; then
    passed=$((passed + 1)); echo "ok   $1"
  else
    failed=$((failed + 1)); echo "FAIL $1"; tail -n 40 "$log"
  fi
}

script() { # name command...: the same for a script that may say 77: it cannot be had here
  local name=$1 rc
  shift
  "$@" >"$log" 2>&1
  rc=$?
  if [ $rc -eq 77 ]; then
    skipped=$((skipped + 1)); echo "skip $name: $(tail -n 1 "$log")"
  else
    result "$name" $rc
  fi
}

sum_of() { grep -aE "^\[ *$1 *\] [0-9]+ test" "$log" | sed -E 's/^[^]]*\] ([0-9]+).*/\1/' | awk '{s += $1} END {print s + 0}'; }

program() { # label path: counts the tests of one cmocka program
  local start=$SECONDS rc p f s
  timeout 900 "$2" >"$log" 2>&1
  rc=$?
  p=$(sum_of PASSED) f=$(sum_of FAILED) s=$(sum_of SKIPPED)
  if [ $rc -ne 0 ] && [ "$f" -eq 0 ]; then
    f=1 # it crashed, timed out or leaked
  fi
  if [ $rc -eq 0 ] && [ $((p + s)) -eq 0 ]; then
    f=1 # a program that ran no test proves nothing
  fi
  passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
  if [ "$f" -eq 0 ]; then
    echo "ok   $1: $p passed, $s skipped ($((SECONDS - start)) s)"
  else
    echo "FAIL $1: $p passed, $f failed, exit $rc"
    grep -aE '\[ *(FAILED|ERROR) *\]|error:|ERROR:|SUMMARY' "$log" | head -n 40
    tail -n 25 "$log"
  fi
}

unit() { for t in "$1"/tests/test_*; do [[ $t == *.d ]] || program "${2:-}$(basename "$t")" "$t"; done; }

isa() {
  for name in $("$build/millrace" devices --json | python3 -c 'import json,sys; print(*json.load(sys.stdin)["devices"][0]["isa"])'); do
    for t in forward oracle engine; do
      MILLRACE_ISA=$name program "$name test_$t" "$build/tests/test_$t"
    done
  done
}

sanitized() { # mode names...: builds and runs the named test programs
  local mode=$1 t
  shift
  if ! make --no-print-directory -j"$(nproc)" MODE="$mode" BUILD="$build/$mode" CC=clang \
      "$build/$mode/millrace" "${@/#/$build/$mode/tests/}" >"$log" 2>&1; then
    result "$mode build" 1
    return
  fi
  for t in "$@"; do program "$mode $t" "$build/$mode/tests/$t"; done
}

all_tests() { basename -a tests/unit/test_*.c | sed 's/\.c$//'; }

fuzz_replay() { # the committed corpus; tests/fuzz.sh looks for more
  local name names rc
  names=$(basename -a tests/fuzz/fuzz_*.c | sed 's/^fuzz_//; s/\.c$//')
  if ! make --no-print-directory -j"$(nproc)" MODE=asan BUILD="$build/asan" CC=clang \
      $(printf "$build/asan/replay_%s " $names) >"$log" 2>&1; then
    result "fuzz-replay build" 1
    return
  fi
  MR_FUZZ_DIR=$(mktemp -d)
  export MR_FUZZ_DIR
  for name in $names; do
    ASAN_OPTIONS=allocator_may_return_null=1 timeout 300 "$build/asan/replay_$name" "tests/fuzz/corpus/$name" >"$log" 2>&1
    rc=$?
    result "fuzz-replay $name: $(tail -n 1 "$log")" $rc
  done
  rm -rf "$MR_FUZZ_DIR"
}

for suite in "$@"; do
  echo "== $suite"
  case $suite in
    unit) unit "$build" ;;
    isa) isa ;;
    cli) for t in tests/cli/*/; do tests/cli/one.sh "$build/millrace" "$t" >"$log" 2>&1; result "cli $(basename "$t")" $?; done ;;
    tidy) python3 tests/tidy.py >"$log" 2>&1; result tidy $? ;;
    clang)
      make --no-print-directory -j"$(nproc)" BUILD="$build/clang" CC=clang "$build/clang/millrace" >"$log" 2>&1
      result "clang build" $? ;;
    asan) sanitized asan $(cat tests/asan-fast.txt) ;;
    asan-all) sanitized asan $(all_tests) ;;
    tsan) sanitized tsan test_pool test_spill test_kvtier test_forward test_engine
      script "tsan run" python3 tests/threads.py "$build/tsan/millrace" ;;
    valgrind) tests/valgrind.sh "$build/millrace" >"$log" 2>&1; result valgrind $? ;;
    stop) script stop python3 tests/stop.py "$build/millrace" ;;
    kill) script kill python3 tests/kill.py "$build/millrace" 30 ;;
    kill-long) script kill-long python3 tests/kill.py "$build/millrace" 1000 ;;
    crash)
      for t in crash faults faults_commands; do MR_CRASH_SEEDS=100 program "crash test_$t" "$build/tests/test_$t"; done ;;
    memory) script memory python3 tests/memory.py "$build/millrace" ;;
    memory-long) script memory-long python3 tests/memory.py "$build/millrace" long models/SmolLM2-135M-Instruct.Q4_1.gguf ;;
    cron) script cron tests/cron.sh "$build/millrace" ;;
    systemd) script systemd tests/systemd.sh "$build/millrace" ;;
    mutants) python3 tests/mutants.py "$build" >"$log" 2>&1; result "mutants: $(tail -n 1 "$log")" $? ;;
    device-check) python3 scripts/device-check.py "$build" sim "$build/device-check-sim.json" >"$log" 2>&1; result device-check $? ;;
    slurm) script slurm tests/slurm.sh "$build/millrace" ;;
    fuzz-replay) fuzz_replay ;;
    *) echo "unknown suite $suite" >&2; exit 64 ;;
  esac
done
echo
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
