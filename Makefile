# make            the virtual environment, ready to use
# make demo       from nothing to a sentence, a bench table and a JSON report by a real model
# make test       what CI runs: lint, then every test that this machine can run
# make native     compile kernels/cpu again after an edit (up to a minute or two)
# make sanitize   the kernels' tests under the address, undefined-behaviour and thread sanitizers (many minutes)
# make emulate    the kernels' tests of the set avx512 on a processor with AVX2 (some minutes)
#
# TORCH_INDEX=URL takes torch, and torch alone, from another package index (a CPU-only or another CUDA build).
VENV ?= .venv
PYTHON ?= python3
JOBS ?= 2
TORCH_INDEX ?=
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
LLMX := $(VENV)/bin/llmx

# In the checkout, not in the venv, and one for each venv: another clone must install itself into a shared one.
READY := build/ready$(subst /,-,$(abspath $(VENV)))
$(PY):
	$(PYTHON) -m venv $(VENV)
$(READY): $(PY) pyproject.toml CMakeLists.txt constraints.txt
	$(PIP) install -q -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) install -q -c constraints.txt scikit-build-core nanobind cmake ninja
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	@$(PY) -c "from llmx.kernels import cpu; print('cpu kernels:', cpu.describe())"
	@mkdir -p build && touch $@

.DEFAULT_GOAL := $(READY)
.PHONY: demo test lint native sanitize emulate clean

demo: $(READY)
	$(LLMX) pull demo
	$(LLMX) generate --model demo --temperature 0 --max-tokens 48 "What is the capital of Germany?"
	$(LLMX) bench demo -p 128 -n 32 -r 3 --requests 8 --concurrency 4 --input-len 32:128 --output-len 16:48 \
		--json build/demo-bench.json

# One thread for each of pytest's processes: the tests are many and small.
test: $(READY) lint native
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS)

# Without a compiler the install above went on in pure Python; here that is an error, and shown.
native: $(READY)
	@if $(PY) -c "import sys; from llmx.kernels import cpu; sys.exit(not cpu.available())"; then \
		$(PY) -c "import llmx; llmx.__loader__.rebuild()" > build/native.log 2>&1 || { cat build/native.log; false; }; \
	else \
		LLMX_REQUIRE_NATIVE=1 $(PIP) install -q --no-deps --no-build-isolation -e .; \
	fi

# The library built another way for tests alone, in BUILT and with OPTIONS for CMake; and the tests of every op on it.
CXX ?= g++
KERNEL_TESTS ?= $(addprefix tests/unit/test_,cpu_ops.py cpu_rows.py linear_packed.py linear_int8.py pack.py sample.py \
	quantize_blocks.py grids_native.py native.py random.py)
build_it = mkdir -p $(BUILT) && { $(VENV)/bin/cmake -S . -B $(BUILT) -G Ninja -DCMAKE_CXX_COMPILER=$(CXX) \
	-DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja -DPython_EXECUTABLE=$(abspath $(PY)) \
	-Dnanobind_DIR=$$($(PY) -m nanobind --cmake_dir) $(OPTIONS) && $(VENV)/bin/cmake --build $(BUILT) -j $(JOBS); } \
	> $(BUILT).log 2>&1 || { cat $(BUILT).log; false; }
test_it = LLMX_NATIVE=$$(ls $(BUILT)/_native*.so) PYTHONPATH=tests $(PY) -m pytest -q -p native.instead $(KERNEL_TESTS)

# With sanitizers in it, and with the instruction sets that run here; then the queue and kernels in a program of their
# own. The preloaded libraries are those that a Python built without sanitizers lacks.
sanitize: BUILT := build/sanitize/native
sanitize: OPTIONS = -DCMAKE_BUILD_TYPE=Debug -DLLMX_SANITIZE=address,undefined -DLLMX_WITHOUT="$$($(PY) -c \
	'from llmx.kernels import cpu; print(*{"avx2", "avx512", "avx512bf16"} - set(cpu.native().isas()), sep=";")')"
sanitize: $(READY)
	$(build_it)
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=2 $(test_it)
	$(CXX) -std=c++17 -O1 -g1 -fsanitize=thread -DDRIVE_KERNELS -DLLMX_ISA=portable -ffp-contract=off -Wno-psabi \
		-Ikernels/cpu tests/native/queue_driver.cpp kernels/cpu/runtime/pool.cpp kernels/cpu/*.cpp -o $(BUILT)/driver -pthread
	TSAN_OPTIONS=die_after_fork=0 $(BUILT)/driver

# The sources of the set avx512, with tests/native/avx512_emulated.h for what this processor may lack.
emulate: BUILT := build/emulate
emulate: OPTIONS := -DCMAKE_BUILD_TYPE=Release -DLLMX_EMULATE_AVX512=ON "-DLLMX_WITHOUT=avx2;avx512bf16"
emulate: $(READY)
	$(build_it)
	OMP_NUM_THREADS=1 $(test_it) -n $(JOBS)

# mypy doesn't know that kernels/* is mapped into the package, so it checks a tree of links where it is.
TYPED := build/typed
lint: $(READY)
	$(PY) -m ruff check -q .
	$(PY) -m ruff format -q --check .
	rm -rf $(TYPED) && mkdir -p $(TYPED)
	cp -rs $(CURDIR)/llmx $(TYPED)/ && cp -rs $(CURDIR)/kernels/* $(TYPED)/llmx/kernels/
	$(PY) -m mypy -p llmx

clean:
	rm -rf $(VENV) build
