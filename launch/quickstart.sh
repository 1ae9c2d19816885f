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

tiny=configs/models/tiny-mla
if fetch_smollm2; then
  show mpirun -np 2 build/heddle generate --model "$HEDDLE_SMOLLM2" --max-tokens 48 --temperature 0 \
      --prompt "A loom is a machine that" --prompt "The capital of France is"
  show mpirun -np 2 build/heddle bench throughput --model "$HEDDLE_SMOLLM2" \
      --num-prompts 8 --input-len 64 --output-len 32
else
  echo "Going on with $tiny alone: it knows one book."
  show mpirun -np 2 build/heddle bench throughput --model $tiny \
      --num-prompts 8 --input-len 64 --output-len 32
fi

# Latent attention and experts: each rank keeps half of the latents' pages.
show mpirun -np 2 build/heddle generate --model $tiny --decode-context-parallel-size 2 \
    --max-tokens 48 --temperature 0.7 --top-p 0.9 --seed 1 \
    --prompt "And it came to pass" --prompt "In the beginning"
show build/heddle inspect --model $tiny --tensor-parallel-size 2 --decode-context-parallel-size 2
