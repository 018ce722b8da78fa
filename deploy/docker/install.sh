#!/bin/sh
# usage: install.sh VENV : builds proa from the working directory, installs it into VENV and takes the build tools away
#
# BUILD_PYTHON: the Python with the build tools, if it is not that of VENV.
set -eu
[ -f CMakeLists.txt ] || { echo "[install.sh] expected the project's directory, got $PWD." >&2; exit 2; }
venv=$1
python="${BUILD_PYTHON:-$venv/bin/python}"
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
PATH="$(dirname "$python"):$PATH" "$python" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$wheels" .
"$python" -m pip --python "$venv/bin/python" install --quiet --no-cache-dir --no-deps --no-index "$wheels"/proa-*.whl
"$python" -m pip --python "$venv/bin/python" uninstall --quiet --yes cmake ninja nanobind scikit-build-core
