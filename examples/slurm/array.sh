#!/bin/bash
# A job as a Slurm array: each task computes one shard.
#     export CREATED=$(date +%s)
#     sbatch --array=1-8 examples/slurm/array.sh rows.jsonl model.gguf results
#     sbatch --dependency=afterok:JOBID examples/slurm/merge.sh results
# A task that is stopped (time limit, preemption) is put back into the queue and goes on where it was.
#SBATCH --job-name=millrace
#SBATCH --cpus-per-task=2
#SBATCH --time=08:00:00
#SBATCH --signal=B:TERM@60
#SBATCH --requeue
#SBATCH --open-mode=append
rows=$1 model=$2 out=$3

# In the background, so that the shell gets the signal that comes 60 s before the time limit, and passes it on.
# Failed rows do not fail a task (--tolerate): merge.sh says so at the end.
"${MILLRACE:-millrace}" run "$rows" -m "$model" -o "$out.$SLURM_ARRAY_TASK_ID.jsonl.zst" --shard slurm \
  --threads "${SLURM_CPUS_PER_TASK:-1}" ${CREATED:+--created "$CREATED"} --tolerate 100% &
child=$!
trap 'kill -TERM $child' TERM
wait $child
rc=$?
if [ $rc -gt 128 ]; then # the trap ended the wait, not the run
  wait $child
  rc=$?
fi
if [ $rc -eq 75 ]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
exit $rc
