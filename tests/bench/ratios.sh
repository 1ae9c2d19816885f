#!/bin/sh
# Runs every bench program three times and prints a line for each of its measurements:
#   name ratio asked
# The ratio is the median of the runs; asked is 0 where nothing is asked. On an otherwise idle
# machine. Usage: tests/bench/ratios.sh [BUILD_DIR]
set -eu
build=${1:-build}
# OpenBLAS' threads must not spin beside ours.
export OMP_WAIT_POLICY=passive

lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
for run in 1 2 3; do
  for program in "$build"/tests/bench/*_bench; do
    case $program in */comm_bench) continue ;; esac  # of several ranks; by hand
    echo "run $run of $program" >&2
    "$program" >>"$lines"
  done
done

# Medians, in the order of the first run.
awk '
  !($1 in count) { order[++names] = $1; asked[$1] = $3 }
  { ratio[$1, ++count[$1]] = $2 }
  END {
    for (i = 1; i <= names; ++i) {
      name = order[i]; n = count[name]
      for (a = 1; a <= n; ++a) for (b = a + 1; b <= n; ++b) if (ratio[name, b] < ratio[name, a]) {
        t = ratio[name, a]; ratio[name, a] = ratio[name, b]; ratio[name, b] = t
      }
      printf "%-56s %8.3f %6.2f\n", name, ratio[name, int((n + 1) / 2)], asked[name]
    }
  }' "$lines"
