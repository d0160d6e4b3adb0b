#!/usr/bin/env bash
# examples/slurm on a real single-node Slurm of its own: an array of shards, of which one is stopped and requeued, and the
# merge; then the same shards under GNU parallel. slurm.sh BINARY
# Exit 77: it cannot be had here (not root, no slurmctld, slurmd, munged, or they do not start).
set -euo pipefail
skip() { echo "skipped: $*"; exit 77; }
binary=$(realpath "$1")
repo=$PWD
model=$(realpath models/SmolLM2-135M-Instruct.Q4_1.gguf)
[ "$(id -u)" -eq 0 ] || skip "not root"
for program in slurmctld slurmd munged sbatch; do
  command -v $program >/dev/null || PATH=$PATH:/usr/sbin command -v $program >/dev/null || skip "no $program"
done
[ -f "$model" ] || skip "no model"
PATH=$PATH:/usr/sbin

work=$(mktemp -d)
cleanup() {
  for pid in ctld.pid d.pid munge/pid; do
    [ ! -s "$work/$pid" ] || kill "$(cat "$work/$pid")" 2>/dev/null || true
  done
  sleep 1
  rm -rf "$work"
}
trap cleanup EXIT
chmod 755 "$work"
mkdir -p "$work"/{state,spool,munge}
chmod 711 "$work/munge"
host=$(hostname -s)
cat >"$work/slurm.conf" <<C
ClusterName=millrace
SlurmctldHost=$host
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge/sock,cred_expire=5
CredType=cred/munge
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/ctld.pid
SlurmdPidFile=$work/d.pid
SlurmctldLogFile=$work/ctld.log
SlurmdLogFile=$work/d.log
SlurmctldPort=16817
SlurmdPort=16818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/builtin
NodeName=$host CPUs=$(nproc) State=UNKNOWN
PartitionName=test Nodes=$host Default=YES MaxTime=INFINITE State=UP
C
export SLURM_CONF=$work/slurm.conf
(umask 077 && head -c 1024 /dev/urandom >"$work/munge/key")
munged --force --key-file="$work/munge/key" --socket="$work/munge/sock" --pid-file="$work/munge/pid" \
  --log-file="$work/munge/log" --seed-file="$work/munge/seed" || skip "munged does not start"
slurmctld -c -f "$SLURM_CONF" || skip "slurmctld does not start"
slurmd -c -f "$SLURM_CONF" -N "$host" || skip "slurmd does not start"
for _ in $(seq 30); do
  sinfo -h -o %T 2>/dev/null | grep -q idle && break
  sleep 0.5
done
sinfo -h -o %T | grep -q idle || skip "no idle node: $(tail -n 2 "$work/ctld.log")"

cd "$work"
for i in $(seq 60); do
  printf '{"id": "r%d", "prompt": "Story %d of %d. Once upon a time", "max_tokens": 48, "temperature": 0}\n' "$i" $((i % 4)) "$i"
done >rows.jsonl
export MILLRACE=$binary CREATED=1700000000
id=$(sbatch --parsable --array=1-3 --cpus-per-task=1 "$repo/examples/slurm/array.sh" rows.jsonl "$model" results)
sbatch --quiet --dependency="afterok:$id" "$repo/examples/slurm/merge.sh" results
for _ in $(seq 100); do # the first task stops once it has begun to compute
  grep -qs ' run ' "slurm-${id}_1.out" && break
  sleep 0.1
done
scancel --batch --signal=TERM "${id}_1"
for _ in $(seq 240); do
  [ -e results.manifest.json ] && break
  sleep 0.5
done
[ -e results.manifest.json ] || { echo "not merged after two minutes"; squeue; tail -n 5 slurm-*.out; exit 1; }
grep -q 'the same command resumes the job' "slurm-${id}_1.out" || { echo "task 1 was not stopped"; cat "slurm-${id}_1.out"; exit 1; }
"$binary" run rows.jsonl -m "$model" -o whole.jsonl.zst --created $CREATED --progress none
"$binary" check results
cmp whole.jsonl.zst results.jsonl.zst
if command -v parallel >/dev/null; then
  parallel -j 2 "$binary" run rows.jsonl -m "$model" -o part{}.jsonl.zst --shard {}/3 --created $CREATED --progress none ::: $(seq 3)
  "$binary" merge -o joined.jsonl.zst part*.manifest.json
  cmp whole.jsonl.zst joined.jsonl.zst
fi
