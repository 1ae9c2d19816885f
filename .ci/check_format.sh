#!/bin/bash
# Checks that every C++ file is as .clang-format has it.
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files -z '*.h' '*.cc' '*.cu' '*.cuh' | xargs -0 -r clang-format-14 --dry-run --Werror
