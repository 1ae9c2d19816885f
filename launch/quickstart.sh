#!/bin/bash
# From a fresh Debian bookworm to text: packages, build, model, two ranks. Run it again at will.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/setup.sh

install_packages "${packages_to_build[@]}"
cmake --preset release -DHEDDLE_TESTS=OFF >/dev/null
cmake --build build --target heddle
allow_mpirun

# Prints a command as one would type it, and runs it.
show() {
  printf '\n$'
  local word
  for word in "$@"; do [[ $word == *' '* ]] && word="\"$word\""; printf ' %s' "$word"; done
  printf '\n'
  "$@"
}

if fetch_smollm2; then
  show mpirun -np 2 build/heddle generate --model "$HEDDLE_SMOLLM2" --max-tokens 48 --temperature 0 \
      --prompt "A loom is a machine that" --prompt "The capital of France is"
  show mpirun -np 2 build/heddle bench throughput --model "$HEDDLE_SMOLLM2" \
      --num-prompts 8 --input-len 64 --output-len 32
else
  echo "Going on with a small model of random weights: its text means nothing."
  dummy=(--model configs/models/tiny-gqa --load-format dummy --seed 1)
  prompts=build/quickstart-prompts.jsonl
  printf '{"id":"%s","prompt_token_ids":[%s]}\n' a 1,2,3,4 b 5,6,7,8,9 >$prompts
  show mpirun -np 2 build/heddle generate "${dummy[@]}" --max-tokens 16 --temperature 0 \
      --prompt-file $prompts
  show mpirun -np 2 build/heddle bench throughput "${dummy[@]}" \
      --num-prompts 8 --input-len 64 --output-len 32
fi
