# make demo | demo-jax | demo-vllm | test | test-vllm | docs | test-versions | sanitize | fuzz-cxx | lint | format | library | compare-machine-code | wheel | clean.
# A fresh machine needs Python 3.11 or newer and gcc.
#
# PYTHON       the interpreter that .venv is made with
# VLLM         the version of vLLM that demo-vllm and test-vllm run: 0.12.0, 0.13.0, 0.14.1, 0.15.1 or 0.16.0
# XLA_GPU_CUDA ON or OFF: whether the library holds CUDA handlers; ON where a GPU is found, and in wheels
# TEST_JOBS    processes of `make test`, `test-vllm`, `test-oldest`, `test-newest` and `sanitize`, 2 by default; each takes 3 GB and more
# GROUP_SOURCES ON or OFF: short sources compiled together, as pip install does; for `make library` and `library-cuda`
# CUDAARCHS    what GPUs the installed library or the wheel has code for: this machine's, or all in wheels
PYTHON       ?= python3
WHEEL_CUDA   := $(or $(XLA_GPU_CUDA),ON)
XLA_GPU_CUDA ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo ON || echo OFF)
JOBS         ?= $(shell nproc)
TEST_JOBS    ?= 2
CUDA_ARCH    ?= 90a-real
GROUP_SOURCES ?= OFF

VENV    := .venv
VLLM    ?= 0.12.0
VLLM_ENV := build/vllm-$(VLLM)
# vLLM without its requirements. The distribution vllm-tpu is its Python side alone, and exists for some versions.
VLLM_WHEEL_0.12.0 := vllm-tpu==0.12.0
VLLM_WHEEL := $(or $(VLLM_WHEEL_$(VLLM)),vllm==$(VLLM))
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check --quiet
HEADERS := build/ffi-headers
# Processes of tests share few cores. OpenMP's threads wait by spinning: one for each process. Where no GPU compiles, XLA's own
# code is compiled without LLVM's optimisations, which cost more than they save: with both, tests take a fourth less. The
# demos and test-oldest run as users' programs do.
FAST    := OMP_NUM_THREADS=1 $(if $(filter OFF,$(XLA_GPU_CUDA)),XLA_FLAGS="$(strip --xla_backend_optimization_level=0 $(XLA_FLAGS))")
SOURCES := $(shell git ls-files CMakeLists.txt pyproject.toml third_party ffi python 2>/dev/null)

.PHONY: demo demo-jax demo-vllm docs test test-vllm test-versions test-oldest test-newest test-triton test-adapters sanitize fuzz-cxx lint \
        format library library-cuda \
        compare-machine-code test-handlers wheel clean
.DELETE_ON_ERROR:

# ---- What users run ------------------------------------------------------------------------------------------------
demo: $(VENV)/.installed
	$(BIN)/python examples/serve_llama.py --check

demo-jax: $(VENV)/.installed
	$(BIN)/python examples/serve_llama_jax.py --check

demo-vllm: $(VENV)/.installed $(VLLM_ENV)/.done
	PJRT_DEVICE=CPU $(VLLM_ENV)/bin/python examples/serve_vllm.py --check

test: $(VENV)/.installed test-handlers
	$(FAST) XLA_GPU_TEST_HANDLERS=$(HANDLERS) $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile

test-vllm: $(VENV)/.installed $(VLLM_ENV)/.done
	$(FAST) PJRT_DEVICE=CPU $(VLLM_ENV)/bin/python -m pytest -q -r fE -n $(TEST_JOBS) --dist loadfile tests/vllm

# ---- Set-up: frameworks once, the package again whenever one of its sources changed ----------------------------------
$(VENV)/.frameworks: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	$(BIN)/python third_party/requirements.py test | $(PIP) install -r /dev/stdin
	# torch_xla 2.9's wheel holds an older torchax, and whichever is installed last overwrites the other's files.
	$(BIN)/python third_party/requirements.py torchax | grep ^torchax | $(PIP) install --force-reinstall --no-deps -r /dev/stdin
	touch $@

$(VENV)/.installed: $(VENV)/.frameworks $(SOURCES)
	XLA_GPU_CUDA=$(XLA_GPU_CUDA) $(PIP) install --force-reinstall --no-deps .
	touch $@

$(VENV)/.dev: $(VENV)/.frameworks
	$(BIN)/python third_party/requirements.py dev | $(PIP) install -r /dev/stdin
	touch $@

# vLLM's Python side, without the CUDA packages that it requires, and with the frameworks and the package of $(VENV): its own
# transformers stands before theirs.
$(VLLM_ENV)/.done: $(VENV)/.frameworks third_party/requirements.py
	$(BIN)/python -m venv $(VLLM_ENV)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > $$($(VLLM_ENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/frameworks.pth
	$(BIN)/python third_party/requirements.py vllm-test | \
	  $(VLLM_ENV)/bin/python -m pip --disable-pip-version-check --quiet install -r /dev/stdin
	$(VLLM_ENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps $(VLLM_WHEEL)
	touch $@

# The FFI headers as the build requires them, for builds by hand.
$(HEADERS)/.done: third_party/xla_ffi.cmake
	version=$$(sed -n 's/^set(XLA_GPU_JAXLIB_FOR_HEADERS "\(.*\)")/\1/p' $<) && \
	  $(PYTHON) -m pip --disable-pip-version-check --quiet install --upgrade --no-deps --target $(HEADERS) jaxlib==$$version
	touch $@

# ---- Work on the library: found by the package through XLA_GPU_LIBRARY ------------------------------------------------
CMAKE_FLAGS := -DXLA_GPU_FFI_INCLUDE_DIR=$(CURDIR)/$(HEADERS)/jaxlib/include -DXLA_GPU_GROUP_SOURCES=$(GROUP_SOURCES)
CMAKE       := PATH="$(CURDIR)/$(BIN):$$PATH" cmake

library: $(VENV)/.dev $(HEADERS)/.done
	$(CMAKE) -S . -B build/host $(CMAKE_FLAGS) -DXLA_GPU_CUDA=OFF -DXLA_GPU_WERROR=ON
	$(CMAKE) --build build/host -j $(JOBS)

library-cuda: $(VENV)/.dev $(HEADERS)/.done
	$(CMAKE) -S . -B build/cuda $(CMAKE_FLAGS) -DXLA_GPU_WERROR=ON -DXLA_GPU_LINE_TABLES=ON \
	  -DCMAKE_CUDA_ARCHITECTURES=$(CUDA_ARCH)
	$(CMAKE) --build build/cuda -j $(JOBS)

# make compare-machine-code BASE=<commit>: the kernels whose machine code the tree changes, with their registers, spills,
# stack and shared memory before and after. Exit status 0 where all kernels are the same.
MACHINE_CODE := build/machine-code

$(MACHINE_CODE)/tools/.done:
	$(PYTHON) -m pip --disable-pip-version-check --quiet install --upgrade --no-deps --target $(@D) \
	  'nvidia-cuda-cuobjdump==13.2.*'
	touch $@

compare-machine-code: $(VENV)/.dev $(HEADERS)/.done $(MACHINE_CODE)/tools/.done
	@test -n "$(BASE)" || { echo "compare-machine-code: BASE=<commit> names what to compare with" >&2; exit 2; }
	commit=$$(git rev-parse --verify "$(BASE)^{commit}") && \
	  if test -e $(MACHINE_CODE)/base/.git; then git -C $(MACHINE_CODE)/base checkout --quiet --detach $$commit; \
	  else git worktree prune && git worktree add --quiet --detach $(MACHINE_CODE)/base $$commit; fi
	$(CMAKE) -S $(MACHINE_CODE)/base -B $(MACHINE_CODE)/build $(CMAKE_FLAGS) -DCMAKE_CUDA_ARCHITECTURES=$(CUDA_ARCH)
	$(CMAKE) --build $(MACHINE_CODE)/build -j $(JOBS)
	$(MAKE) library-cuda
	PATH="$(CURDIR)/$(MACHINE_CODE)/tools/nvidia/cu13/bin:$$PATH" \
	  $(BIN)/python -m tests.machine_code $(MACHINE_CODE)/build build/cuda

# Third-party handlers, which the tests register and call through ffi_call, and a PJRT plug-in without a device.
test-handlers: $(VENV)/.dev $(HEADERS)/.done
	$(CMAKE) -S . -B build/test-handlers $(CMAKE_FLAGS) -DXLA_GPU_CUDA=OFF -DXLA_GPU_TEST_HANDLERS=ON
	$(CMAKE) --build build/test-handlers -j $(JOBS) --target xla_gpu_test_handlers xla_gpu_fake_pjrt_plugin

# For everybody: code for all GPUs that the kernels run on.
wheel: $(VENV)/.dev
	rm -rf dist build/wheel
	XLA_GPU_CUDA=$(WHEEL_CUDA) CUDAARCHS="$(or $(CUDAARCHS),all)" $(BIN)/python -m build --wheel --outdir build/wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist build/wheel/*.whl

# ---- Other versions of JAX, sanitizers, fuzzing ------------------------------------------------------------------------
HANDLERS := $(CURDIR)/build/test-handlers/ffi/testing/libxla_gpu_test_handlers.so

# The oldest and the newest jaxlib that the supported Pythons allow. `make test` has the newest for .venv's Python.
test-versions: test-oldest test-newest test-triton

# The oldest precedes .venv's own on the path, so that torch_xla's calls, which jaxlib lowers, are tested with it too.
OLDEST_JAX   := 0.7.0
OLDEST_TESTS := tests/ops/test_simple_add.py tests/ops/test_reshape_and_cache.py tests/ops/test_merge_attention_states.py \
                $(addprefix tests/frontends/test_,jax.py export.py frontends_agree.py errors_agree.py ffi_call.py ffi_attributes.py \
                  ffi_errors.py coexist.py) \
                tests/properties/test_handler_checks.py tests/runtime/test_doctor.py tests/skew/test_registration.py

build/versions/jax-$(OLDEST_JAX)/.done: $(VENV)/.frameworks
	$(PIP) install --upgrade --no-deps --target $(@D) jax==$(OLDEST_JAX) jaxlib==$(OLDEST_JAX)
	touch $@

test-oldest: $(VENV)/.installed test-handlers build/versions/jax-$(OLDEST_JAX)/.done
	PYTHONPATH=$(CURDIR)/build/versions/jax-$(OLDEST_JAX) XLA_GPU_TEST_HANDLERS=$(HANDLERS) \
	  $(BIN)/python -m pytest -q -r fE -n $(TEST_JOBS) --dist loadfile $(OLDEST_TESTS)

# The newest of all wants a newer Python than the oldest that is supported, and gets an environment without PyTorch.
NEWER_PYTHON ?= $(shell for python in python3.13 python3.12 $$HOME/.pyenv/versions/3.13.*/bin/python \
                $$HOME/.pyenv/versions/3.12.*/bin/python; do $$python -c "import venv" 2>/dev/null && echo $$python && break; done)

build/versions/newest/.done: pyproject.toml
	$(NEWER_PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check --quiet install --upgrade jax jaxlib numpy ml_dtypes pytest pytest-xdist hypothesis
	touch $@

ifeq ($(NEWER_PYTHON),)
test-newest:
	@echo "test-newest: skipped, since there is no Python 3.12 or 3.13; NEWER_PYTHON names one"
else
test-newest: $(VENV)/.installed test-handlers build/versions/newest/.done
	library=$$($(BIN)/python -c "from xla_gpu._runtime import library; print(library.find())") && \
	$(FAST) PYTHONPATH=$(CURDIR)/python XLA_GPU_LIBRARY=$$library XLA_GPU_TEST_HANDLERS=$(HANDLERS) \
	  build/versions/newest/bin/python -m pytest -q -r fE -n $(TEST_JOBS) --dist loadfile
endif

# Kernels compiled by the newest Triton; PyTorch 2.9.0 has 3.5. Its versions change what a launch is given (3.6: clusters
# in the grid), so the next one, 3.10, is added here when it was tried: its release must not fail other people's changes.
NEWEST_TRITON := triton>=3.9,<3.10

build/versions/triton/.done: $(VENV)/.frameworks
	$(PIP) install --upgrade --no-deps --target $(@D) '$(NEWEST_TRITON)'
	touch $@

test-triton: $(VENV)/.installed build/versions/triton/.done
	PYTHONPATH=$(CURDIR)/build/versions/triton $(BIN)/python -m pytest -q -r fE tests/user_kernels/test_triton_call.py

# The adapters against the projects' own packages, in an environment of its own: their pins are not ours. tpu-inference
# wants vLLM and libtpu; its reference needs neither.
ADAPTERS := build/versions/adapters

$(ADAPTERS)/.done:
	$(PYTHON) -m venv $(ADAPTERS)
	$(ADAPTERS)/bin/python -m pip --disable-pip-version-check --quiet install ejkernel==0.0.80.3 ml_dtypes pytest hypothesis
	$(ADAPTERS)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps tpu-inference==0.32.0
	touch $@

test-adapters: $(VENV)/.installed $(ADAPTERS)/.done
	library=$$($(BIN)/python -c "from xla_gpu._runtime import library; print(library.find())") && \
	PYTHONPATH=$(CURDIR)/python XLA_GPU_LIBRARY=$$library $(ADAPTERS)/bin/python -m pytest -q -r fE tests/adapters \
	  tests/frontends/test_ragged_paged_attention_v3.py

# AddressSanitizer and UndefinedBehaviorSanitizer in the library, in the third-party handlers, in the fake plug-in and in
# the fuzz target; ThreadSanitizer in a program of its own. Three options need reasons:
# - detect_leaks=0: Python and the frameworks give back little at exit, and the leak checker reports all of it.
# - no detect_stack_use_after_return: GCC 12 aligns such frames too little for AVX-512 (fixed in 12.4), a crash of its own.
# - libstdc++ preloaded: AddressSanitizer looks for it at start, and Python brings none.
SANITIZE       := build/sanitize
SANITIZE_TESTS := tests/ops tests/skew/test_registration.py tests/runtime/test_pjrt_adapter.py \
                  tests/runtime/test_shared_buffers.py tests/user_kernels/test_handlers.py \
                  $(addprefix tests/frontends/test_,eager.py ffi_call.py ffi_attributes.py ffi_errors.py) \
                  $(addprefix tests/properties/test_,handler_checks.py bad_values.py batch_invariance.py) \
                  $(addprefix tests/robustness/test_,sanitizers.py metadata.py memory.py)
SANITIZED      := $(FAST) LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so) \
                  $$(gcc -print-file-name=libstdc++.so.6)" ASAN_OPTIONS=detect_leaks=0 \
                  UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 XLA_GPU_SANITIZED=1 \
                  XLA_GPU_LIBRARY=$(CURDIR)/$(SANITIZE)/ffi/libxla_gpu_ffi.so \
                  XLA_GPU_TEST_HANDLERS=$(CURDIR)/$(SANITIZE)/ffi/testing/libxla_gpu_test_handlers.so
FUZZ_RUNS      ?= 500000

sanitize: $(VENV)/.installed $(VENV)/.dev $(HEADERS)/.done
	$(CMAKE) -S . -B $(SANITIZE) $(CMAKE_FLAGS) -DXLA_GPU_CUDA=OFF -DXLA_GPU_TEST_HANDLERS=ON -DXLA_GPU_SANITIZE=ON \
	  -DXLA_GPU_FUZZ=ON -DCMAKE_CXX_FLAGS_RELEASE=-O1
	$(CMAKE) --build $(SANITIZE) -j $(JOBS)
	$(SANITIZE)/ffi/testing/xla_gpu_thread_test
	ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 XLA_GPU_NUM_THREADS=2 \
	  $(SANITIZE)/ffi/testing/xla_gpu_fuzz_call_frame -runs=$(FUZZ_RUNS)
	$(SANITIZED) $(BIN)/python -m pytest -q -r fE -n $(TEST_JOBS) --dist loadfile $(SANITIZE_TESTS) \
	  -k "not torch_xla and not cuda and not agrees_with"
	for isa in baseline avx2; do \
	  $(SANITIZED) XLA_GPU_HOST_ISA=$$isa $(BIN)/python -m pytest -q -r fE -n $(TEST_JOBS) tests/ops/test_paged_attention.py \
	    -k "eager and not cuda" || exit 1; \
	done

# The fuzz target by libFuzzer, which looks for inputs that reach new code: needs clang++ and its runtime (Debian:
# apt-get install clang libclang-rt-14-dev). What it finds is kept in build/fuzz-cxx/corpus.
FUZZ_SECONDS ?= 300

fuzz-cxx: $(VENV)/.dev $(HEADERS)/.done
	$(CMAKE) -S . -B build/fuzz-cxx $(CMAKE_FLAGS) -DCMAKE_CXX_COMPILER=clang++ -DXLA_GPU_CUDA=OFF -DXLA_GPU_SANITIZE=ON \
	  -DXLA_GPU_FUZZ=ON -DCMAKE_CXX_FLAGS_RELEASE=-O1
	$(CMAKE) --build build/fuzz-cxx -j $(JOBS) --target xla_gpu_fuzz_call_frame
	mkdir -p build/fuzz-cxx/corpus
	cd build/fuzz-cxx && ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 XLA_GPU_NUM_THREADS=1 \
	  ffi/testing/xla_gpu_fuzz_call_frame -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -print_final_stats=1 corpus

# ---- The documentation site --------------------------------------------------------------------------------------------
# build/site/index.html; warnings are errors. Made from the sources alone: no library, PyTorch or JAX is needed.
build/docs/.done: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(PYTHON) third_party/requirements.py docs | \
	  $(@D)/bin/python -m pip --disable-pip-version-check --quiet install -r /dev/stdin
	touch $@

docs: build/docs/.done
	PATH="$(CURDIR)/build/docs/bin:$$PATH" NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs --quiet build --strict -f docs/site/mkdocs.yml
	@echo "build/site/index.html"

# ---- Linters ---------------------------------------------------------------------------------------------------------
PYTHON_FILES := python tests examples benchmarks third_party docs/site
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
