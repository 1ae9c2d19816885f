#!/bin/bash
# Shows that check_layers.sh lets good includes pass and catches each kind of bad one.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root"/{kernels/base,parallel,cache,runtime,launch,tests}

put() { mkdir -p "$root/$(dirname "$1")"; printf '%s\n' "$2" >"$root/$1"; }
check() { .ci/check_layers.sh "$root" 2>&1; }

put kernels/base/a.h '#include <vector>'
put parallel/b.h '#include "kernels/base/a.h"'
put cache/c.h '#include "kernels/base/a.h"'
put runtime/d.cc '#include "cache/c.h"
#include "parallel/b.h"
#include "absl/status/status.h"'
put launch/e.cc '#include "runtime/d.h"'
put launch/bootstrap.cc '#include <mpi.h>'
put parallel/channel_mpi.cc '#include <mpi.h>'
put tests/t.cc '#include "launch/e.h"'
check || { echo "check_layers_test.sh: a good tree was refused" >&2; exit 1; }

# refused FILE LINE: the line alone makes the check fail, and the message names the place.
refused() {
  put "$1" "$2"
  if message=$(check) || [[ $message != *"$1:1: "* ]]; then
    echo "check_layers_test.sh: not caught: $1: $2" >&2
    exit 1
  fi
  rm "$root/$1"
}
refused kernels/x.cc '#include "cache/c.h"'
refused kernels/x.h '#include "runtime/d.h"'
refused parallel/x.h '#include "cache/c.h"'
refused cache/x.cu '  #  include "parallel/b.h"'
refused runtime/x.cc '#include <launch/e.h>'
refused launch/x.cc '#include "tests/t.h"'
refused launch/x.cc '#include <mpi.h>'
refused runtime/bootstrap.cc '#include "mpi.h"'
refused parallel/communicator.cc '#include <nccl.h>'
refused runtime/x.cc '#include "../cache/c.h"'
refused cache/x.cc '#include "c.h"'
check
