# Everything is done in .venv, from the pins of constraints.txt: a machine needs Python >= 3.11 and make, nothing else.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
export PYRIGHT_PYTHON_CACHE_DIR := $(CURDIR)/.venv/pyright
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: install demo test check bench format clean
install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install  ## train the PPO example: warm-up, then PPO, about a minute on two cores
	$(BIN)/colocate run docs/examples/ppo.yaml

test: install
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy core/colocate executors/colocate_local plugins/colocate_ppo
	$(BIN)/pyright

bench: install  ## one table; ratios are of things measured side by side in this run
	$(BIN)/python -m tests.bench

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache
