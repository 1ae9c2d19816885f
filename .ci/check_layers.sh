#!/bin/bash
# Checks that includes follow the arrows: launch -> runtime -> {parallel, cache} -> kernels, and that
# MPI and NCCL are touched only where they may be.  Usage: check_layers.sh [ROOT]
set -euo pipefail
cd "${1:-$(dirname "$0")/..}"

declare -A may_include=(
  [kernels]="kernels"
  [parallel]="parallel kernels"
  [cache]="cache kernels"
  [runtime]="runtime parallel cache kernels"
  [launch]="launch runtime parallel cache kernels"
)
faults=0
fault() { echo "$1" >&2; faults=$((faults + 1)); }

# file:line:included, for every include of the five folders (tests may include anything).
includes() {
  grep -rnE --include='*.h' --include='*.cc' --include='*.cu' --include='*.cuh' \
      '^[[:space:]]*#[[:space:]]*include[[:space:]]*["<]' "${!may_include[@]}" |
    sed -E 's/^([^:]+:[0-9]+):[^"<]*(["<])([^">]+)[">].*$/\1 \2 \3/'
}

while read -r where quote included; do
  file=${where%:*}
  folder=${file%%/*}
  target=${included%%/*}
  case $included in
    mpi.h | mpi-ext.h)
      case $file in
        launch/bootstrap.cc | parallel/*_mpi.cc) ;;
        *) fault "$where: only launch/bootstrap.cc and parallel/*_mpi.cc include $included" ;;
      esac ;;
    nccl.h)
      [ "$file" = parallel/communicator_nccl.cc ] ||
        fault "$where: only parallel/communicator_nccl.cc includes nccl.h" ;;
    ./* | ../*)
      fault "$where: $included: include from the project's root" ;;
    *)
      if [ -n "${may_include[$target]:-}" ] || [[ $target =~ ^(tests|configs)$ ]]; then
        [[ " ${may_include[$folder]} " == *" $target "* ]] ||
          fault "$where: $folder may not include $target ($included)"
      elif [ "$quote" = '"' ] && [ -e "$(dirname "$file")/$included" ]; then
        fault "$where: $included: include from the project's root"
      fi ;;
  esac
done < <(includes)

if [ $faults -gt 0 ]; then
  echo "check_layers.sh: $faults includes run against the arrows" >&2
  exit 1
fi
