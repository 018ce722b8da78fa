#!/bin/sh
# usage: packages.sh build|run : Debian packages for a stage of the image
set -eu
case "${1:-}" in
  build) set -- g++ make python3 python3-dev python3-venv ;;
  # Triton compiles small launchers when a GPU is used; NVIDIA's images say by CUDA_VERSION what they are.
  run) if [ -n "${CUDA_VERSION:-}" ]; then set -- gcc libc6-dev python3 python3-dev; else set -- python3; fi ;;
  *) echo "[packages.sh] expected build or run, got '${1:-}'." >&2; exit 2 ;;
esac
apt-get update
apt-get install --yes --no-install-recommends "$@"
rm -rf "${ROOT:-}/var/lib/apt/lists"
