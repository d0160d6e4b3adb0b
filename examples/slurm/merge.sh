#!/bin/bash
# Joins what the tasks of array.sh left.
#SBATCH --job-name=millrace-merge
out=$1
exec "${MILLRACE:-millrace}" merge -o "$out.jsonl.zst" "$out".[0-9]*.manifest.json
