# Everything runs in .venv, which the first target that needs it creates. PYTHON chooses the interpreter (3.11 to 3.13).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all lint types experiments format clean

demo: $(VENV)/.installed
	$(BIN)/attnlab sweep experiment=quickstart

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m ''

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# Every shipped experiment, for two steps.
experiments: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/experiments/test_shipped_experiments.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt --editable .
	touch $@

# mamba-ssm without its kernels is an oracle on a CPU.
$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE $(PIP) install --quiet --constraint constraints.txt --no-build-isolation --no-deps mamba-ssm
	touch $@ $(VENV)/.installed
