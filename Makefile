# make            the virtual environment, ready to use
# make demo       from nothing to a sentence, a bench table and a JSON report by a real model
# make test       what CI runs: lint, then every test that this machine can run
# make native     compile kernels/cpu again after an edit (about two seconds)
#
# TORCH_INDEX=URL takes torch, and torch alone, from another package index (a CPU-only or another CUDA build).
VENV ?= .venv
PYTHON ?= python3
JOBS ?= 2
TORCH_INDEX ?=
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
LLMX := $(VENV)/bin/llmx
export LLMX_REQUIRE_NATIVE ?= 1

# In the checkout, not in the venv: another clone must install itself into a shared venv.
READY := build/ready
$(READY): pyproject.toml CMakeLists.txt constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) install -q -c constraints.txt scikit-build-core nanobind cmake ninja
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	mkdir -p build && touch $@

.DEFAULT_GOAL := $(READY)
.PHONY: demo test lint native clean
