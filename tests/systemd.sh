#!/usr/bin/env bash
# The units of examples/cron under a real systemd, a user's, in namespaces of its own. systemd.sh BINARY
# The timer starts the job; it is stopped (75 counts as success); the timer starts it again, and it ends well.
# Exit 77: it cannot be had here (not root, no systemd, no namespaces). Takes about half a minute.
set -euo pipefail
skip() { echo "skipped: $*"; exit 77; }
cd "$(dirname "$0")/.."

inside() { # in the namespaces: binary work
  local binary=$1 work=$2 unit=$2/home/.config/systemd/user pid
  ctl() { systemctl --user "$@"; }
  wait_until() { for _ in $(seq 300); do "$@" && return 0; sleep 0.1; done; echo "not within 30 s: $*"; return 1; }
  shown() { ctl show millrace.service -p "$1" --value; }
  done_rows() { "$binary" status "$work/results.jsonl.zst" --json 2>/dev/null | grep -q '"rows_done": *[1-9]'; }
  idle() { [ "$(shown ActiveState)" = inactive ]; }
  mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system /run/user/0 "$unit" || exit 77
  export XDG_RUNTIME_DIR=/run/user/0 HOME=$work/home SYSTEMD_LOG_TARGET=console
  sed "/^User=/d; s|/srv/night|$work|; s|/usr/local/bin/millrace run|$binary run|; s|--until 06:30|--threads 1|" \
    examples/cron/millrace.service >"$unit/millrace.service"
  sed 's|^OnCalendar=.*|OnCalendar=*:*:0/2\nAccuracySec=100ms|' examples/cron/millrace.timer >"$unit/millrace.timer"
  /usr/lib/systemd/systemd --user >"$work/systemd.log" 2>&1 &
  pid=$!
  wait_until ctl is-system-running >/dev/null 2>&1 || exit 77
  # Whoever refers to the service keeps what is known of its end.
  printf '[Unit]\nAfter=millrace.service\n[Service]\nExecStart=sleep infinity\n' >"$unit/keep.service"
  ctl daemon-reload
  ctl start keep.service millrace.timer
  wait_until done_rows
  ctl stop millrace.timer millrace.service
  echo "stopped: result $(shown Result), exit $(shown ExecMainStatus)"
  [ "$(shown Result)" = success ] && [ "$(shown ExecMainStatus)" = 75 ]
  [ ! -e "$work/results.manifest.json" ]
  ctl start millrace.timer
  wait_until test -e "$work/results.manifest.json"
  ctl stop millrace.timer
  wait_until idle
  echo "finished: result $(shown Result), exit $(shown ExecMainStatus)"
  [ "$(shown Result)" = success ] && [ "$(shown ExecMainStatus)" = 0 ]
  "$binary" check "$work/results.jsonl.zst"
  kill "$pid"
  wait "$pid" || true
}

if [ "${1:-}" = inside ]; then
  inside "$2" "$3"
  exit
fi
binary=$(realpath "$1")
[ "$(id -u)" -eq 0 ] || skip "not root"
[ -x /usr/lib/systemd/systemd ] && command -v systemctl >/dev/null || skip "no systemd"
unshare --mount --pid --fork --mount-proc --cgroup true 2>/dev/null || skip "no namespaces"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
PYTHONPATH=tests python3 - "$work" <<'P'
import sys, tinyjob
tinyjob.write_model(f"{sys.argv[1]}/model.gguf")
with open(f"{sys.argv[1]}/rows.jsonl", "w") as f:
    for i in range(40000):  # some seconds
        f.write('{"id":"r%d","prompt":"row %d ","max_tokens":2}\n' % (i, i))
P
rc=0
timeout 120 unshare --mount --pid --fork --kill-child --mount-proc --cgroup "$0" inside "$binary" "$work" || rc=$?
[ $rc -eq 77 ] && skip "no user manager here: $(tail -n 1 "$work/systemd.log" 2>/dev/null)"
[ $rc -eq 0 ] || tail -n 20 "$work/systemd.log"
exit $rc
