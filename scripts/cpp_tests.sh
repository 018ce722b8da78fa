#!/usr/bin/env bash
# Configures, builds and runs the C++ tests in build/cpp-<name>.
#
#   scripts/cpp_tests.sh                      plain build
#   scripts/cpp_tests.sh address,undefined    under ASan and UBSan
#   scripts/cpp_tests.sh thread               under TSan, the tests that share memory between threads
#   scripts/cpp_tests.sh [SANITIZER] REGEX    only the tests whose name matches
set -euo pipefail

cd "$(dirname "$0")/.."
sanitizer=${1:-}
only=${2:-}
case $sanitizer in
  "") name=plain; type=Release; flags="" ;;
  address,undefined) name=asan; type=Debug; flags="-O1 -fno-sanitize-recover=all" ;;
  thread) name=tsan; type=Debug; flags="-O1"; only=${only:-"thread_pool|stream_worker|paged_attention|expert_"} ;;
  *) echo "usage: scripts/cpp_tests.sh [address,undefined | thread] [REGEX]" >&2; exit 2 ;;
esac
build=build/cpp-$name
mkdir -p build

cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=$type -DCMAKE_CXX_FLAGS="$flags" -DPROA_SANITIZE="$sanitizer" \
  -DPROA_BUILD_PYTHON=OFF -DPROA_BUILD_TESTS=ON >"$build.log" 2>&1 || { cat "$build.log" >&2; exit 1; }
ctest=(ctest --test-dir "$build" --no-tests=error ${only:+--tests-regex "$only"})
mapfile -t tests < <("${ctest[@]}" --show-only | sed -n 's/^ *Test *#[0-9]*: //p')  # each has a target of its name
[ ${#tests[@]} -gt 0 ] || { echo "no C++ test matches '$only'" >&2; exit 2; }
cmake --build "$build" --parallel "${PROA_BUILD_JOBS:-$(nproc)}" --target "${tests[@]}"
"${ctest[@]}" --output-on-failure --parallel "${PROA_BUILD_JOBS:-$(nproc)}"
