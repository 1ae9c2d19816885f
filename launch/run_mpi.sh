#!/bin/bash
# Runs heddle under mpirun: on this machine, or over the hosts of a hostfile ("node1 slots=4" a line).
#
#   launch/run_mpi.sh [-n RANKS] [-f HOSTFILE] [--dry-run] -- generate --model ... --prompt ...
#
# RANKS defaults to the slots of the hostfile, or to one. --dry-run prints the hosts and the command.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/setup.sh

usage() { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }

ranks='' hostfile='' dry_run=false
while [ $# -gt 0 ]; do
  case $1 in
    -n) ranks=${2:?}; shift 2 ;;
    -f) hostfile=${2:?}; shift 2 ;;
    --dry-run) dry_run=true; shift ;;
    --) shift; break ;;
    *) usage ;;
  esac
done
[ $# -gt 0 ] || usage

# A host without slots=N has one.
hosts() {
  sed 's/#.*//' "$1" | awk 'NF { slots = 1
    for (i = 2; i <= NF; i++) if (sub(/^slots=/, "", $i)) slots = $i
    print $1, slots }'
}

command=(mpirun)
if [ -n "$hostfile" ]; then
  [ -r "$hostfile" ] || { echo "run_mpi.sh: cannot read the hostfile $hostfile" >&2; exit 2; }
  slots=$(hosts "$hostfile" | awk '{ total += $2 } END { print total + 0 }')
  ranks=${ranks:-$slots}
  if [ "$ranks" -gt "$slots" ]; then
    echo "run_mpi.sh: $ranks ranks asked, but $hostfile has $slots slots; raise slots= or lower -n" >&2
    exit 2
  fi
  command+=(--hostfile "$hostfile" --map-by slot)
else
  ranks=${ranks:-1}
fi
allow_mpirun
# Heddle's threads choose their cores.
command+=(-np "$ranks" --bind-to none build/heddle "$@")

if $dry_run; then
  if [ -n "$hostfile" ]; then
    hosts "$hostfile" | awk -v left="$ranks" '{ n = left < $2 ? left : $2; left -= n; print $1 ": " n " ranks" }'
  else
    echo "$(hostname): $ranks ranks"
  fi
  echo "${command[*]}"
  exit 0
fi
exec "${command[@]}"
