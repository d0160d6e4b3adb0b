#!/usr/bin/env bash
# Holds a compiler's report on the GPU kernels against kernels/gpu/budget.txt. gpu-budget.sh nvidia|amd REPORT
# REPORT: what `ptxas -v` or clang's kernel-resource-usage remarks say. Exit 1: over budget, or a kernel is missing.
set -euo pipefail

awk -v maker="$1" '
  FNR == NR {
    if ($1 ~ /^[a-z]/) { regs[$1] = maker == "nvidia" ? $2 : $3; spills[$1] = $4 }
    next
  }
  match($0, /mr_k_[a-z0-9_]+/) { name = substr($0, RSTART + 5, RLENGTH - 5); seen[name] = 1 }
  / bytes spill stores/ { split($0, w, /[ ,]+/); for (i in w) if (w[i] == "spill" && w[i + 1] == "stores") spilled[name] += w[i - 2] }
  /Used [0-9]+ registers/ { match($0, /Used [0-9]+/); used[name] += substr($0, RSTART + 5, RLENGTH - 5) }
  /remark: +VGPRs: / || /remark: +AGPRs: / { sub(/ *\[-Rpass.*/, ""); used[name] += $NF }
  /remark: +VGPRs Spill: / { sub(/ *\[-Rpass.*/, ""); spilled[name] += $NF }
  /static shared|bytes smem/ { print "budget: " name " has static shared memory"; bad = 1 }
  END {
    for (k in regs) {
      if (!seen[k]) { print "budget: no kernel " k " in the report"; bad = 1 }
      if (used[k] > regs[k]) { print "budget: " k " takes " used[k] " registers of " regs[k]; bad = 1 }
      if (spilled[k] > spills[k]) { print "budget: " k " spills " spilled[k] " of " spills[k]; bad = 1 }
    }
    for (k in seen) if (!(k in regs)) { print "budget: " k " has none in kernels/gpu/budget.txt"; bad = 1 }
    exit bad
  }' "$(dirname "$0")/../kernels/gpu/budget.txt" "$2"
