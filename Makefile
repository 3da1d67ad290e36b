# Everything is done in .venv, from the pins of constraints.txt: a machine needs Python >= 3.11 and make, nothing else.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
BARE := .venv/bare
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

$(BARE)/.installed: $(INSTALLED)  # an environment without any extra, in which some tests run
	$(PYTHON) -m venv $(BARE)
	$(BARE)/bin/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

test: install $(BARE)/.installed
	COLOCATE_BASE_PYTHON=$(CURDIR)/$(BARE)/bin/python $(BIN)/python -m pytest

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy core/colocate executors plugins/colocate_ppo
	$(BIN)/pyright

bench: install  ## one table; ratios are of things measured side by side in this run
	$(BIN)/python -m tests.bench

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache
