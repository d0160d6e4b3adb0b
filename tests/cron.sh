#!/usr/bin/env bash
# The line of examples/cron/crontab through a real cron daemon, as the user nobody. cron.sh BINARY
# Exit 77: it cannot be had here (not root, no cron, nobody has a crontab). Takes up to 75 s: cron looks once a minute.
set -euo pipefail
skip() { echo "skipped: $*"; exit 77; }
binary=$(realpath "$1")
model=$(realpath models/SmolLM2-135M-Instruct.Q4_1.gguf)
[ "$(id -u)" -eq 0 ] || skip "not root"
command -v cron >/dev/null && command -v crontab >/dev/null || skip "no cron"
[ -f "$model" ] || skip "no model"
crontab -u nobody -l >/dev/null 2>&1 && skip "nobody has a crontab"

work=$(mktemp -d)
daemon=
cleanup() {
  crontab -u nobody -r 2>/dev/null || true
  [ -z "$daemon" ] || kill "$daemon" 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT
mkdir "$work/bin" "$work/night"
cp "$binary" "$work/bin/millrace"
cp "$model" "$work/night/model.gguf"
printf '{"prompt": "One, two, %s,", "max_tokens": 3, "temperature": 0}\n' three four >"$work/night/rows.jsonl"
chown -R nobody "$work"

# The example's line, but each minute, here, and with its end written down.
line=$(grep '^15 1 ' examples/cron/crontab | sed "s|^15 1 |* * |; s|/srv/night|$work/night|")
crontab -u nobody - <<C
PATH=$work/bin:/usr/bin:/bin
HOME=$work/night
MAILTO=""
$line >$work/night/log 2>&1; echo \$? >$work/night/rc.new; mv $work/night/rc.new $work/night/rc
C
if ! pidof cron >/dev/null; then
  cron -f &
  daemon=$!
fi
for _ in $(seq 150); do
  [ -e "$work/night/rc" ] && break
  sleep 0.5
done
[ -e "$work/night/rc" ] || { echo "cron did not run it within 75 s"; exit 1; }
[ "$(cat "$work/night/rc")" = 0 ] || { echo "exit $(cat "$work/night/rc")"; cat "$work/night/log"; exit 1; }
[ ! -s "$work/night/log" ] || { echo "a success that is not quiet:"; cat "$work/night/log"; exit 1; }
"$binary" check "$work/night/results.jsonl.zst"
[ "$(zstd -dcq "$work/night/results.jsonl.zst" | wc -l)" -eq 2 ]
grep -q 'millrace_phase{phase="done"} 1' "$work/night/millrace.prom"
