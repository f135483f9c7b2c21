# make demo | test | lint | format | library | wheel | clean. A fresh machine needs Python 3.11 or newer and gcc.
#
# PYTHON       the interpreter that .venv is made with
# XLA_GPU_CUDA ON or OFF: whether the installed library holds CUDA handlers; ON where a GPU is found
PYTHON       ?= python3
XLA_GPU_CUDA ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo ON || echo OFF)
JOBS         ?= $(shell nproc)
CUDA_ARCH    ?= 90a-real

VENV    := .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check --quiet
HEADERS := build/ffi-headers
SOURCES := $(shell git ls-files CMakeLists.txt pyproject.toml third_party ffi python 2>/dev/null)

.PHONY: demo test lint format library library-cuda test-handlers wheel clean
.DELETE_ON_ERROR:

# ---- What users run ------------------------------------------------------------------------------------------------
demo: $(VENV)/.installed
	$(BIN)/python examples/serve_llama.py --check

test: $(VENV)/.installed test-handlers
	XLA_GPU_TEST_HANDLERS=$(CURDIR)/build/test-handlers/ffi/testing/libxla_gpu_test_handlers.so \
	  $(BIN)/python -m pytest

# ---- Set-up: frameworks once, the package again whenever one of its sources changed ----------------------------------
$(VENV)/.frameworks: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	$(BIN)/python third_party/requirements.py test | $(PIP) install -r /dev/stdin
	touch $@

$(VENV)/.installed: $(VENV)/.frameworks $(SOURCES)
	XLA_GPU_CUDA=$(XLA_GPU_CUDA) $(PIP) install --force-reinstall --no-deps .
	touch $@

$(VENV)/.dev: $(VENV)/.frameworks
	$(BIN)/python third_party/requirements.py dev | $(PIP) install -r /dev/stdin
	touch $@

# The FFI headers as the build requires them, for builds by hand.
$(HEADERS)/.done: third_party/xla_ffi.cmake
	version=$$(sed -n 's/^set(XLA_GPU_JAXLIB_FOR_HEADERS "\(.*\)")/\1/p' $<) && \
	  $(PYTHON) -m pip --disable-pip-version-check --quiet install --upgrade --no-deps --target $(HEADERS) jaxlib==$$version
	touch $@

# ---- Work on the library: found by the package through XLA_GPU_LIBRARY ------------------------------------------------
CMAKE_FLAGS := -DXLA_GPU_FFI_INCLUDE_DIR=$(CURDIR)/$(HEADERS)/jaxlib/include
CMAKE       := PATH="$(CURDIR)/$(BIN):$$PATH" cmake

library: $(VENV)/.dev $(HEADERS)/.done
	$(CMAKE) -S . -B build/host $(CMAKE_FLAGS) -DXLA_GPU_CUDA=OFF -DXLA_GPU_WERROR=ON
	$(CMAKE) --build build/host -j $(JOBS)

library-cuda: $(VENV)/.dev $(HEADERS)/.done
	$(CMAKE) -S . -B build/cuda $(CMAKE_FLAGS) -DXLA_GPU_WERROR=ON -DCMAKE_CUDA_ARCHITECTURES=$(CUDA_ARCH)
	$(CMAKE) --build build/cuda -j $(JOBS)

# Handlers of "other people", which the tests register through the bridge.
test-handlers: $(VENV)/.dev $(HEADERS)/.done
	$(CMAKE) -S . -B build/test-handlers $(CMAKE_FLAGS) -DXLA_GPU_CUDA=OFF -DXLA_GPU_TEST_HANDLERS=ON
	$(CMAKE) --build build/test-handlers -j $(JOBS) --target xla_gpu_test_handlers

wheel: $(VENV)/.dev
	rm -rf dist build/wheel
	XLA_GPU_CUDA=$(XLA_GPU_CUDA) $(BIN)/python -m build --wheel --outdir build/wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist build/wheel/*.whl

# ---- Linters ---------------------------------------------------------------------------------------------------------
PYTHON_FILES := python tests examples benchmarks third_party
CXX_FILES    := $(shell git ls-files 'ffi/*.h' 'ffi/*.cc' 'ffi/*.cu' 'ffi/*.cuh' 2>/dev/null)

lint: $(VENV)/.dev
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/ruff format --check $(PYTHON_FILES)
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix $(PYTHON_FILES)
	$(BIN)/ruff format $(PYTHON_FILES)
	$(BIN)/clang-format -i $(CXX_FILES)

clean:
	rm -rf build dist $(VENV)
