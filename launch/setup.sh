# Shared by the scripts of this folder and by .ci/run: source it from the project's root.
#   install_packages    Debian packages that are missing (root, or sudo); none missing: no apt at all
#   allow_mpirun        environment for mpirun as root, and for more ranks than cores
#   fetch_smollm2       sets HEDDLE_SMOLLM2 to the real model, or says why it cannot

# The libraries are those of configs/cmake/HeddleDependencies.cmake, in its order.
packages_to_build=(g++ cmake ninja-build pkg-config openmpi-bin python3 python3-pip ca-certificates
                   libabsl-dev nlohmann-json3-dev libopenmpi-dev libcli11-dev libyaml-cpp-dev
                   libsimdjson-dev libhwy-dev libpcre2-dev libsentencepiece-dev libxxhash-dev
                   libutf8proc-dev)
packages_to_test=(libgtest-dev libgmock-dev liblzma-dev libbenchmark-dev libopenblas-openmp-dev)
packages_for_ci=(git clang-14 libclang-rt-14-dev clang-format-14)

# install_packages NAME...
install_packages() {
  if ! command -v apt-get >/dev/null; then
    echo "Not a Debian system; install what corresponds to: $*" >&2
    return 1
  fi
  local missing
  mapfile -t missing < <(comm -23 <(printf '%s\n' "$@" | sort -u) \
      <(dpkg-query -W -f '${db:Status-Status} ${Package}\n' | sed -n 's/^installed //p' | sort -u))
  [ ${#missing[@]} -gt 0 ] || return 0
  echo "Installing ${missing[*]}"
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
      echo "Not root, and there is no sudo. As root: apt-get install ${missing[*]}" >&2
      return 1
    fi
    as_root=(sudo)
  fi
  "${as_root[@]}" apt-get -q update
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get -q -y install --no-install-recommends "${missing[@]}"
}

allow_mpirun() {
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  export OMPI_MCA_rmaps_base_oversubscribe=1
  # Heddle's threads choose their cores; Open MPI would put all of a rank's on one.
  export OMPI_MCA_hwloc_base_binding_policy=none
  # Kernel-assisted copies between ranks are slower than plain ones, and fail in some containers.
  export OMPI_MCA_btl_vader_single_copy_mechanism=none
}

# Keeps what the caller has set. Without the model, tests that need it say that they are skipped.
fetch_smollm2() {
  [ -z "${HEDDLE_SMOLLM2:-}" ] || return 0
  if HEDDLE_SMOLLM2=$(launch/fetch_model.sh); then
    export HEDDLE_SMOLLM2
  else
    unset HEDDLE_SMOLLM2
    return 1
  fi
}
