# Everything is done in .venv, from the pins of constraints.txt: a machine needs Python >= 3.11 and make, nothing else.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
BARE := .venv/bare
VERL := .venv/verl
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
	COLOCATE_BASE_PYTHON=$(CURDIR)/$(BARE)/bin/python $(BIN)/python -m pytest -n 2 --dist loadfile

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy core/colocate executors plugins/colocate_ppo
	$(BIN)/pyright

$(VERL)/.installed: $(INSTALLED)  # verl beside everything that .venv has, for a comparison in the bench only
	$(PYTHON) -m venv $(VERL)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> "$$($(VERL)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth"
	$(VERL)/bin/python -m pip install --quiet --no-deps verl==0.9.1 omegaconf==2.4.0 antlr4-python3-runtime==4.9.3
	touch $@

bench: install $(VERL)/.installed  ## one table; ratios are of things measured side by side in this run
	VERL_PYTHON=$(CURDIR)/$(VERL)/bin/python $(BIN)/python -m tests.bench

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache
