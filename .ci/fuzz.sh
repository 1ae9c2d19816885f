#!/bin/bash
# Runs every fuzzer of a build on its committed corpus, two at a time.  Usage: fuzz.sh BUILD SECONDS
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1 seconds=$2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

fuzz() {
  local program=$1 name
  name=$(basename "$program" _fuzzer)
  mkdir -p "$scratch/$name"
  # What it finds goes to the first folder, which is thrown away; the corpus stays as committed.
  if "$program" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
      -artifact_prefix="$build/$name-" "$scratch/$name" "tests/fuzz/corpus/$name" \
      >"$scratch/$name.log" 2>&1; then
    echo "$name: $(sed -n 's/^stat::number_of_executed_units: *//p' "$scratch/$name.log") runs, no fault"
  else
    tail -n 60 "$scratch/$name.log"
    echo "$name: FAILED; the input is $build/$name-*, also printed above as Base64"
    return 1
  fi
}

mapfile -t programs < <(find "$build" -type f -executable -name '*_fuzzer' | sort)
running=() failed=0
for program in "${programs[@]}"; do
  if [ ${#running[@]} -eq 2 ]; then
    wait "${running[0]}" || failed=1
    running=("${running[1]}")
  fi
  fuzz "$program" &
  running+=($!)
done
for job in "${running[@]}"; do wait "$job" || failed=1; done
exit $failed
