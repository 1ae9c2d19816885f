#!/bin/bash
# Builds the release preset and runs every test but the nightly ones. Arguments go to ctest.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/setup.sh

install_packages "${packages_to_build[@]}" "${packages_to_test[@]}"
cmake --preset release
cmake --build build
allow_mpirun
fetch_smollm2 || echo "Tests of the real model will be skipped."
ctest --test-dir build -LE nightly --output-on-failure -j "$(nproc)" "$@"
