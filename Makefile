# Every target does its own set-up: a virtual environment in .venv, pinned by constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-slow test-gpu check lint format types layers docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[test]' --constraint constraints.txt
	touch $(STAMP)

demo: setup  ## the whole path on this machine: prepare, train, kill, resume, report
	$(BIN)/omni demo --out demo-run

test: setup lint types layers  ## lint, types, layers and the fast tests
	$(BIN)/python -m pytest -m "not slow and not gpu" -n 2 --dist loadfile

test-slow: setup  ## the tests that take more than some seconds
	$(BIN)/python -m pytest -m "slow"

test-gpu: setup  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m "gpu"

check: test

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: setup
	$(BIN)/mypy

layers: setup
	$(BIN)/lint-imports --no-cache

docs: setup  ## pages that are made from the code
	$(BIN)/python -m omni_pipeline.app.settings_page docs

clean:
	rm -rf $(VENV) build dist demo-run
