# One command per habit; `make` alone lists them.
#
# Each target does its own set-up. Python lives in .venv, everything compiled in build/; the stamp
# .venv/installed is newer than all that the installed package was built from, so that a second run
# starts at once and an edit of csrc/ rebuilds.
#
# The package is installed editable, in scikit-build-core's redirect mode: Python files are read
# where they lie, the compiled module is in site-packages. It is rebuilt here, and not on import
# (editable.rebuild), since tests that start and kill processes by the hundred must not each run
# CMake. And it is built without isolation: in isolation pip would fetch the build requirements anew
# for every rebuild, past constraints.txt.

PYTHON ?= python3
JOBS ?= $(shell nproc)
ROUNDS ?= 2000
FUZZ_SECONDS ?= 600
TIMES ?= 5
SPIN ?= 0
CORES ?=
MODEL ?=
BENCH_FLAGS ?=
BUDGET ?= 540
GPU_FLAGS ?=
CLANG ?= $(shell command -v clang++ || ls /usr/bin/clang++-* 2>/dev/null | sort -V | tail -n 1)
CTEST_FLAGS ?=
PYTEST_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
BENCHED := $(VENV)/benched
MODELS := resnet18 vgg16 inception_v3 alexnet gpt2 bert
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := $(wildcard csrc/*.cc csrc/*.h csrc/*/*.cc csrc/*/*.h)
NATIVE := $(SOURCES) CMakeLists.txt bindings/build_ffi.py
FORMATTED := $(SOURCES) $(wildcard tests/core/*.cc tests/core/*.h tests/crash/*.cc tests/crash/*.h)
FORMATTED += $(wildcard tests/fuzz/*.cc tests/fuzz/*.h tests/fake_cuda/*.cc tests/fake_cuda/*.h)
FORMATTED += $(wildcard tests/gpu/*.cc)
PYTHON_DIRS := $(wildcard lightckpt bindings tests bench examples)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup build demo test quick again soak fsdax lint format tsan asan crash bench clean
.PHONY: python-ready tests-ready arm-ready arm fuzz gpu gpu-wheels bench-engine bench-smoke

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: tests-ready $(INSTALLED) ## make .venv and install the package into it

build: setup ## build the C++ tests with ASan and UBSan
	$(call cmake_build,asan,address$(comma)undefined)

demo: $(INSTALLED) ## kill a training run at random and watch it go on
	$(BIN)/lightckpt demo

test: build ## every test but those in a virtual machine; about twelve minutes on two cores
	$(call ctest,asan)
	$(BIN)/python -m pytest -m "not fsdax" $(PYTEST_FLAGS)

quick: build ## the fast tests; about a minute once built
	$(call ctest,asan)
	$(BIN)/python -m pytest -m "not kill and not slow and not conformance and not fsdax" \
	  $(PYTEST_FLAGS)

again: build ## every test TIMES times, beside SPIN processes that spin, on CORES (0,1) only
	$(BIN)/python tests/again.py --times $(TIMES) --spin $(SPIN) $(if $(CORES),--cores $(CORES))

fsdax: setup ## real DAX and power cuts, in a virtual machine; skips where there can be none
	$(BIN)/python -m pytest tests/fsdax $(PYTEST_FLAGS)

soak: setup ## kill trainers ROUNDS times; two minutes for 2000
	LIGHTCKPT_KILL_ROUNDS=$(ROUNDS) $(BIN)/python -m pytest tests/kill/test_kills.py \
	  $(PYTEST_FLAGS)

lint: setup ## style, types, layout, and the rules in tests/test_tidy.py
	$(BIN)/ruff check $(PYTHON_DIRS)
	$(BIN)/ruff format --check $(PYTHON_DIRS)
	$(BIN)/mypy --strict lightckpt bindings/pypmemobj
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)
	printf '%s\n' csrc/*.cc csrc/*/*.cc | xargs -P $(JOBS) -n 1 \
	  sh -c '$(thread_safety)' $(BIN)/clang-tidy
	$(BIN)/python -m pytest -q tests/test_tidy.py

# What clang finds by csrc/thread_annotations.h. clang-tidy is the clang that comes as a wheel; its
# own checks are off.
thread_safety = "$$0" --quiet --allow-no-checks --checks=-*,clang-diagnostic-* \
  --warnings-as-errors=* "$$@" -- -std=c++20 -Icsrc -Wthread-safety

format: setup ## lay out Python and C++
	$(BIN)/ruff format $(PYTHON_DIRS)
	$(BIN)/clang-format -i $(FORMATTED)

tsan: setup ## the C++ tests under ThreadSanitizer
	$(call cmake_build,tsan,thread)
	$(call ctest,tsan)

# The module is of the same build as the C++ tests. It lies beside a copy of the package, in an
# environment of its own, which borrows all else: a folder named in a .pth brings packages without
# the hook of the editable install. Pytest starts where no lightckpt/ lies beside. Tests that kill
# or boot bring their own processes, the decoders' limit their memory, and those of pypmemobj and
# the benchmark run nothing, or nothing else, that we compiled. SIGBUS is ours to handle.
asan: setup ## the Python tests that fit, on a core with ASan and UBSan; about three minutes
	$(call cmake_build,asan,address$(comma)undefined,--target _ffi)
	$(BIN)/python -m venv --without-pip build/asan-python
	rm -rf build/asan-python/core
	mkdir build/asan-python/core
	cp -r lightckpt bindings/pypmemobj build/asan-python/core/
	cp build/asan/_ffi*.so build/asan-python/core/lightckpt/
	printf '%s\n' "$(abspath build/asan-python/core)" "$$($(BIN)/python -c '$(packages)')" \
	  > "$$(build/asan-python/bin/python -c '$(packages)')/borrowed.pth"
	cd build/asan-python && ASAN_OPTIONS=detect_leaks=0:handle_sigbus=0 \
	  UBSAN_OPTIONS=print_stacktrace=1 \
	  LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so.6)" \
	  bin/python -m pytest -c ../../pyproject.toml --rootdir ../.. -p no:cacheprovider \
	  -m "not kill and not conformance and not fsdax" --ignore ../../tests/test_tidy.py \
	  --ignore ../../tests/pmdk --ignore ../../tests/fuzz --ignore ../../tests/test_bench.py \
	  --ignore-glob '*/tests/test_gpu_*.py' --ignore ../../tests/test_fake_gpu.py \
	  --ignore ../../tests/test_probe.py \
	  $(PYTEST_FLAGS) ../../tests

packages = import sysconfig; print(sysconfig.get_path("purelib"))

# What every processor can do is tried on another one. Its emulator knows no wider instructions of
# x86 than the machines that run this, so those need a machine that has them.
ARM_TESTS := kernels_test copy_test crc32c_test

arm: setup arm-ready ## copies and checksums on aarch64, by qemu-user; half a minute
	$(BIN)/cmake -S tests/arm -B build/arm -G Ninja -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN)/ninja)" \
	  --log-level=WARNING
	$(BIN)/cmake --build build/arm -j $(JOBS)
	for name in $(ARM_TESTS); do timeout 5m qemu-aarch64 -L /usr/aarch64-linux-gnu \
	  build/arm/$$name --gtest_brief=1 || exit 1; done

crash: setup ## every image that a power cut may leave of a small store; two minutes
	$(call cmake_build,release,,--target crash_check)
	build/release/crash_check

# Guided by coverage where there are clang with its runtime, and atheris; by chance where not.
fuzz: setup ## hostile stores, manifests, host state and archives, for FUZZ_SECONDS
	mkdir -p build/fuzz
	rm -f build/fuzz/fuzz_open
	if ! { [ -n "$(CLANG)" ] && $(call fuzz_build,fuzz,fuzz_open,-DLIGHTCKPT_FUZZ=ON \
	  -DCMAKE_CXX_COMPILER="$(CLANG)"); }; then \
	  $(call fuzz_build,asan,fuzz_replay,) && cp build/asan/fuzz_replay build/fuzz/; fi
	[ -d build/fuzz/atheris ] || $(PIP) install -q --no-deps --target build/fuzz/atheris \
	  atheris==3.0.0 || echo "make: no atheris: the Python decoders are fuzzed by chance"
	PYTHONPATH=build/fuzz/atheris $(BIN)/python tests/fuzz/fuzz.py build/fuzz \
	  --seconds=$(FUZZ_SECONDS)

# With PYTHON's own torch, and lightckpt in a folder beside it. Where there is no network, it takes
# what gpu-wheels has left in build/gpu-wheels, made by the same release of Python.
gpu: ## on a machine with a GPU: a probe, tests and figures with PYTHON's own torch, for BUDGET s
	$(PYTHON) bench/gpu_all.py --budget $(BUDGET) $(GPU_FLAGS)

gpu-wheels: ## what make gpu needs where there is no network, in build/gpu-wheels
	$(PYTHON) bench/gpu_site.py build/gpu-wheels

# The six models with a checkpoint in every step; then a small one, which is also killed, and saved
# every 10 and 100 steps; then sizes. With MODEL=gpt2: that one only.
bench: $(BENCHED) ## every model beside what users take instead, and the report; under an hour
	for model in $(or $(MODEL),$(MODELS)); do \
	  $(BIN)/python bench/$$model.py $(BENCH_FLAGS) || exit 1; done
ifeq ($(MODEL),)
	$(BIN)/python bench/small.py --kills 20 $(BENCH_FLAGS)
	$(BIN)/python bench/small.py --every 10 --steps 30 --rounds 2 --strategies $(FEW) --no-recovery
	$(BIN)/python bench/small.py --every 100 --steps 100 --rounds 1 --strategies $(FEW) --no-recovery
	$(BIN)/python bench/scale.py
endif
	$(BIN)/python bench/report.py

FEW := lightckpt,lightckpt-stop,torch.save-safe,safetensors,dcp-async-stager
FEW := $(FEW),checkfreq-style,pccheck-style

bench-engine: $(INSTALLED) ## the engine beside plain copies; appends to bench/results/engine.ndjson
	$(BIN)/python bench/engine.py

bench-smoke: $(BENCHED) ## all scripts of the benchmark on tiny models; under two minutes
	rm -rf build/bench-smoke
	$(BIN)/python bench/smoke.py build/bench-smoke

clean: ## remove what was built, but not .venv
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis $(INSTALLED) $(BENCHED)
	find $(PYTHON_DIRS) -name __pycache__ -prune -exec rm -rf {} +

# $(call need,CHECKS): runs shell lines of the form `try PACKAGE COMMAND...` and installs the Debian
# package of each that fails; where that is not possible, names the command that would.
define need
@missing=""; \
try() { package=$$1; shift; "$$@" >/dev/null 2>&1 || missing="$$missing $$package"; }; \
includes() { echo "#include <$$1>" | c++ -E -x c++ -; }; \
$(1); \
if [ -z "$$missing" ]; then exit 0; fi; \
if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
  echo "make: this needs, as root: apt-get install$$missing" >&2; exit 1; \
fi; \
export DEBIAN_FRONTEND=noninteractive; \
apt-get update -q </dev/null && \
apt-get install -qy --no-install-recommends $$missing </dev/null
endef

# What the package takes: a Python that can make environments and compile, and a C++ compiler.
define python_checks
version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])') || exit 1; \
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "make: $(PYTHON) is $$version, but 3.11 is needed: make PYTHON=... names another" >&2; \
    exit 1; }; \
header=$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h; \
try python$$version-venv $(PYTHON) -c 'import ensurepip, venv'; \
try python$$version-dev test -e "$$header"; \
try g++ includes version
endef

python-ready:
	$(call need,$(python_checks))

tests-ready:
	$(call need,$(python_checks); try libgtest-dev includes gtest/gtest.h)

arm-ready: tests-ready
	$(call need,try g++-aarch64-linux-gnu aarch64-linux-gnu-g++ --version; \
	  try qemu-user qemu-aarch64 -version; try googletest test -d /usr/src/googletest)

$(VENV)/pyvenv.cfg: | python-ready
	$(PYTHON) -m venv $(VENV)

# Later installs are quiet; the first shows what takes so long, which is torch.
quiet = $(if $(wildcard $(INSTALLED)),-q)

# The first line has what building the package takes, and constraints.txt which release of it.
$(INSTALLED): $(VENV)/pyvenv.cfg pyproject.toml constraints.txt $(NATIVE)
	$(PIP) install $(quiet) -c constraints.txt scikit-build-core cffi cmake ninja
	$(PIP) install $(quiet) -c constraints.txt --no-build-isolation \
	  --config-settings=cmake.define.LIGHTCKPT_WERROR=ON -e '.[demo,lint,test]'
	touch $@

# What the benchmark compares with, and its models: pyproject's extra of that name. Beside a CPU
# build of torch its torchvision takes no CUDA: see bench/workloads.py.
$(BENCHED): $(INSTALLED)
	$(PIP) install -q -c constraints.txt $$($(BIN)/python -c '$(bench_packages)')
	touch $@

bench_packages = import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  print(*project["optional-dependencies"]["bench"])

comma := ,

# $(call cmake_build,NAME,SANITIZERS,WHICH): the C++ tests, or WHICH of them, in build/NAME.
define cmake_build
$(BIN)/cmake -S . -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN)/ninja)" \
  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DLIGHTCKPT_TESTS=ON -DLIGHTCKPT_WERROR=ON \
  $(if $(filter asan,$(1)),-DLIGHTCKPT_MODULE=ON -DPython_EXECUTABLE="$(abspath $(BIN)/python)") \
  -DLIGHTCKPT_SANITIZE="$(2)" --log-level=WARNING
$(BIN)/cmake --build build/$(1) -j $(JOBS) $(3)
endef

# $(call fuzz_build,NAME,TARGET,OPTIONS): one program with ASan and UBSan, in build/NAME.
fuzz_build = $(BIN)/cmake -S . -B build/$(1) -G Ninja \
  -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN)/ninja)" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DLIGHTCKPT_TESTS=ON -DLIGHTCKPT_WERROR=ON -DLIGHTCKPT_SANITIZE="address$(comma)undefined" \
  $(3) --log-level=WARNING && $(BIN)/cmake --build build/$(1) --target $(2) -j $(JOBS)

# $(call ctest,NAME): runs what was built in build/NAME.
ctest = $(BIN)/ctest --test-dir build/$(1) -j $(JOBS) --no-tests=error --output-on-failure \
  $(CTEST_FLAGS)
