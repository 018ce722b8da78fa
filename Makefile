# `make chat` talks to the demo model, `make test` checks everything; both set up what they need in .venv.
#
#   make chat PROMPT="Why is the sky blue?"      another question
#   make TORCH_INDEX=URL chat                    take torch from another package index, e.g. one with CPU builds
#   make PYTHON=python3.12 test                  another interpreter for the virtual environment

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
PROMPT ?= What is the capital of France?
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --constraint requirements/constraints.txt
SOURCES := CMakeLists.txt $(shell find csrc -name '*.cc' -o -name '*.h')
FORMATTED := $(shell find csrc -name '*.cc' -o -name '*.h')

export PATH := $(abspath $(BIN)):$(PATH)
export PROMPT
ifneq ($(shell command -v ccache),)
export CMAKE_CXX_COMPILER_LAUNCHER := ccache
endif

.PHONY: help chat test build setup lint types contracts cpp-test py-test fmt flags bench bench-benchy soak clean
.DEFAULT_GOAL := help

help:
	@sed -n '1,5p' Makefile
	@echo "targets: chat test | build lint types contracts cpp-test py-test | fmt flags | bench bench-benchy soak | clean"

chat: $(VENV)/.built
	@$(BIN)/proa chat demo --prompt "$$PROMPT"

test: lint types contracts cpp-test py-test

build: $(VENV)/.built

setup: $(VENV)/.dev $(VENV)/.built

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(if $(FORMATTED),$(BIN)/clang-format --dry-run -Werror $(FORMATTED))
	$(PY) scripts/check_sources.py
	$(PY) scripts/size_check.py

types: $(VENV)/.dev
	$(BIN)/mypy

contracts: $(VENV)/.dev $(VENV)/.built
	$(BIN)/lint-imports

cpp-test: $(VENV)/.runtime
	bash scripts/cpp_tests.sh address,undefined
	bash scripts/cpp_tests.sh thread

py-test: $(VENV)/.dev $(VENV)/.built
	$(PY) -m pytest $(PYTEST_ARGS)

fmt: $(VENV)/.dev
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(if $(FORMATTED),$(BIN)/clang-format -i $(FORMATTED))

flags: $(VENV)/.built
	$(PY) scripts/gen_flags.py
	$(PY) scripts/gen_gateway_keys.py

bench: $(VENV)/.dev $(VENV)/.built
	$(PY) benchmarks/serving/speed.py

# llama-benchy brings 300 MB of its own: a virtual environment of its own, made on demand.
bench-benchy: $(VENV)/.built $(VENV)/.benchy
	$(PY) benchmarks/serving/benchy.py --benchy $(VENV)/benchy/bin/llama-benchy

soak: $(VENV)/.dev $(VENV)/.built
	$(PY) benchmarks/serving/soak.py --minutes 10

clean:
	rm -rf build dist $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3")'
	$(PYTHON) -m venv $(VENV)

# torch first and alone: TORCH_INDEX is asked for it and what it needs, never for the other packages.
$(VENV)/.runtime: pyproject.toml requirements/constraints.txt scripts/requirements.py | $(VENV)/bin/python
	@echo "Installing build tools and run-time packages into $(VENV) (once, a few minutes) ..."
	@$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@$(PY) scripts/requirements.py build runtime demo > $@.txt
	@$(PIP) --requirement $@.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "Installing test tools into $(VENV) ..."
	@$(PY) scripts/requirements.py dev > $@.txt
	@$(PIP) --requirement $@.txt
	@touch $@

$(VENV)/.built: $(SOURCES) $(VENV)/.runtime
	@echo "Building the C++ extension ..."
	@$(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/.benchy: requirements/benchy.txt | $(VENV)/bin/python
	$(PYTHON) -m venv $(VENV)/benchy
	$(VENV)/benchy/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@
