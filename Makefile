# Everything is done in .venv, from the pins of constraints.txt: a machine needs Python >= 3.11 and make, nothing else.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
BARE := .venv/bare
OLDEST := .venv/oldest
NEWEST := .venv/newest
TRAINERS := .venv/trainers
STORES := .venv/stores
TORCH := .venv/torch
ENGINES := .venv/engines
VERL_TESTS := .venv/verl-tests
# What needs one extra alone has an environment of its own, unless there is the one with everything.
DEMO := $(if $(wildcard $(INSTALLED)),.venv,.venv/demo)
DOCS := $(if $(wildcard $(INSTALLED)),.venv,.venv/docs)
# The commit whose number of tokens `make check` compares with. Only an issue's text moves this line.
BASE := f29e12ba
# Besides the one of constraints.txt.
TORCHES := 2.11.0 2.12.0 2.14.1
# Besides the one that .venv has. Each is run as python3.12, or what `make pythons PYTHON3.12=...` names.
PYTHONS := 3.12 3.13
NEXT_PYTHON := 3.14
PY := .venv/py
# Have an environment see the packages of .venv, after its own.
PURELIB := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
BESIDE = site=$$($(BIN)/python $(PURELIB)); (echo $$site; grep -h '^/' $$site/*.pth) > "$$($(1)/bin/python $(PURELIB))/base.pth"
export PYRIGHT_PYTHON_CACHE_DIR := $(CURDIR)/.venv/pyright
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# Tests start Python hundreds of times: a third of each start would be compiling what was compiled before.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test fresh reference suites without versions pythons trainers stores engines verl-tests verl-upstream docs check bench bench-before chaos mutants clusters gpu-wheels gpu format clean FORCE
install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.venv/demo/.installed: EXTRA := ppo
.venv/docs/.installed: EXTRA := docs
.venv/demo/.installed .venv/docs/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	@echo "$(@D) gets colocate with what its extra '$(EXTRA)' needs, this once;$(if $(filter ppo,$(EXTRA)), most of that is torch:) pip shows what it downloads"
	$(@D)/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRA)]'
	touch $@

demo: $(DEMO)/.installed  ## train the PPO example: warm-up, then PPO, about a minute on two cores
	$(DEMO)/bin/colocate run docs/examples/ppo.yaml

$(BARE)/.installed: $(INSTALLED)  # an environment without any extra, in which some tests run
	$(PYTHON) -m venv $(BARE)
	$(BARE)/bin/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

test: install $(BARE)/.installed
	COLOCATE_BASE_PYTHON=$(CURDIR)/$(BARE)/bin/python $(BIN)/python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder -m "not long" -rfE \
		--ignore tests/docs/test_site.py --ignore tests/typing $(FILES)  # `make check` has the site, and both type checkers

fresh:  ## install and test as on a machine that nobody has used, twice; with /tmp in memory; beside another user's files. FILES= for some tests
	NEW_VENV=1 tests/fresh.sh disk sh -c '$(MAKE) test && $(MAKE) test'
	NEW_VENV=1 tests/fresh.sh tmpfs $(MAKE) test
	NEW_VENV=1 tests/fresh.sh others $(MAKE) test

suites: install  ## the whole executor suite on every executor, and what else `make test` leaves out; fifty minutes
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/conformance
	$(BIN)/python -m pytest -n 2 --dist loadfile -m long --ignore tests/conformance
	COLOCATE_LAWS=3 $(BIN)/python -m pytest -n 2 --dist loadfile tests/laws
	$(BIN)/python -m tests.without

without: install  ## take each feature of the table out, one at a time, and run the suite on threads without it
	$(BIN)/python -m tests.without

$(OLDEST)/.installed: $(INSTALLED)  # the oldest Dask of the declared range, beside everything else that .venv has
	$(PYTHON) -m venv $(OLDEST)
	$(call BESIDE,$(OLDEST))
	$(OLDEST)/bin/python -m pip install --quiet --no-deps distributed==2025.4.0 dask==2025.4.0
	touch $@

$(TORCH)-%/.installed: $(INSTALLED)  # another torch that models are renewed in, beside everything else; gigabytes
	$(PYTHON) -m venv $(TORCH)-$*
	$(TORCH)-$*/bin/python -m pip install --quiet torch==$* numpy
	$(call BESIDE,$(TORCH)-$*)
	touch $@

$(TRAINERS)/.installed: $(INSTALLED)  # libraries that people train with, beside everything that .venv has
	$(PYTHON) -m venv $(TRAINERS)
	$(call BESIDE,$(TRAINERS))
	$(TRAINERS)/bin/python -m pip install --quiet --no-deps accelerate==1.15.0 lightning-fabric==2.6.0 lightning-utilities==0.15.2 peft==0.21.2 \
		trl==1.16.0 datasets==4.8.1 dill==0.4.1 multiprocess==0.70.19 pandas==2.3.3 pyarrow==25.0.0
	touch $@

trainers: $(TRAINERS)/.installed  ## what the docs say of Accelerate, Lightning Fabric and PEFT; GRPO's loss beside TRL's
	$(TRAINERS)/bin/python -m pytest tests/trainers

$(STORES)/.installed: $(INSTALLED)  # s3fs, which wants an older python-dateutil, and a server for it, beside everything that .venv has
	$(PYTHON) -m venv $(STORES)
	$(call BESIDE,$(STORES))
	$(STORES)/bin/python -m pip install --quiet --no-deps s3fs==2026.9.0 aiobotocore==3.10.0 aiohappyeyeballs==2.7.1 aiohttp==3.14.5 \
		aioitertools==0.13.0 aiosignal==1.4.0 blinker==1.9.0 boto3==1.43.117 botocore==1.43.117 flask==3.1.3 flask-cors==6.0.5 \
		frozenlist==1.8.0 itsdangerous==2.2.0 jmespath==1.1.0 moto==5.2.5 multidict==7.2.1 propcache==0.5.4 \
		python-dateutil==2.9.0.post0 responses==0.26.3 s3transfer==0.19.3 wrapt==2.5.2 xmltodict==1.0.4 yarl==1.25.1
	touch $@

stores: $(STORES)/.installed  ## checkpoints in object stores: what all hold, on a server that speaks S3
	$(STORES)/bin/python -m pytest tests/stores

$(ENGINES)/.installed: pyproject.toml constraints-engines.txt  # vLLM, which dictates torch and transformers: gigabytes
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --no-deps --requirement constraints-engines.txt
	$(ENGINES)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

engines: $(ENGINES)/.installed  ## vLLM in a role: what all engines hold, and what is its own; on a CPU, Python 3.11
	$(ENGINES)/bin/python -m pytest tests/rollout

$(VERL_TESTS)/.installed: pyproject.toml constraints-verl.txt  # verl, which dictates tensordict and transformers
	$(PYTHON) -m venv $(VERL_TESTS)
	$(VERL_TESTS)/bin/python -m pip install --quiet --no-deps --requirement constraints-verl.txt
	$(VERL_TESTS)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

build/verl/verl-0.9.1/.unpacked: tests/verl/sdist.txt  # verl's tests are in its source distribution only
	$(PYTHON) -m pip download --quiet --no-deps --no-binary verl --require-hashes --requirement $< --dest build/verl
	tar -xzf build/verl/verl-0.9.1.tar.gz -C build/verl
	touch $@

EXECUTOR ?= local
verl-tests: $(VERL_TESTS)/.installed  ## colocate_verl, and verl's own tests on it: EXECUTOR=ray, dask or local; half an hour on a CPU, Python 3.11
	COLOCATE_VERL=$(EXECUTOR) $(VERL_TESTS)/bin/python -m pytest -W ignore tests/verl  # what verl imports warns of much
	$(MAKE) verl-upstream

verl-upstream: $(VERL_TESTS)/.installed build/verl/verl-0.9.1/.unpacked  ## verl's own tests alone, FILES= for some of them
	$(VERL_TESTS)/bin/python tests/verl/upstream.py build/verl/verl-0.9.1 $(EXECUTOR) $(FILES)

$(PY)%/.installed: PYTHON_HERE = $(or $(PYTHON$*),python$*)
$(PY)%/.installed: pyproject.toml constraints.txt  # all that .venv has, in another Python; where torch is no CPU's, gigabytes
	@$(PYTHON_HERE) -c "" || { echo "$(PYTHON_HERE) doesn't run: install Python $*, or name it: make $(MAKECMDGOALS) PYTHON$*=/path/to/python$*"; exit 1; }
	$(PYTHON_HERE) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

pythons: $(PYTHONS:%=$(PY)%/.installed)  ## the suite and what may differ on the other versions of Python; what the next one lacks
	set -e; for version in $(PYTHONS); do \
		$(PY)$$version/bin/python -c "import sys; assert '%d.%d' % sys.version_info[:2] == '$$version'"; \
		$(PY)$$version/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not long" \
			tests/conformance tests/identity tests/laws tests/signals tests/ray tests/dask tests/unit tests/config; \
	done
	$(PYTHON) -m tests.wheels $(NEXT_PYTHON)

versions: pythons $(OLDEST)/.installed $(TORCHES:%=$(TORCH)-%/.installed)  ## Dask's tests and the suite on the versions that colocate supports; parts on today's newest
	$(OLDEST)/bin/python -c "import distributed; assert distributed.__version__ == '2025.4.0'"
	PATH="$(CURDIR)/$(BIN):$$PATH" $(OLDEST)/bin/python -m pytest -n 2 --dist loadfile tests/dask tests/conformance/test_dask.py
	set -e; for version in $(TORCHES); do \
		$(TORCH)-$$version/bin/python -c "import torch; assert torch.__version__.startswith('$$version')"; \
		$(TORCH)-$$version/bin/python -m pytest -n 2 --dist loadfile tests/conformance/test_processes.py -k "renewals or process_group"; \
	done
	$(PYTHON) -m venv --clear $(NEWEST)  # each time: what colocate needs as it is released today, without the pins
	$(NEWEST)/bin/python -m pip install --quiet --editable '.[ray,dask]'
	$(call BESIDE,$(NEWEST))
	$(NEWEST)/bin/python -m pytest -n 2 --dist loadfile -m "not long" tests/unit tests/identity tests/config

SITE := build/site/.built
SITE_FROM := mkdocs.yml $(sort $(shell find docs core executors plugins -name __pycache__ -prune -o -type f -print))
build/site.from: FORCE  # their names: it changes when a file goes. A folder changes when Python is first run there, too
	@mkdir -p build
	@echo $(SITE_FROM) | cmp -s - $@ || echo $(SITE_FROM) > $@

$(SITE): $(DOCS)/.installed $(SITE_FROM) build/site.from
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet --strict
	touch $@

docs: $(SITE)  ## the site of docs/, in build/site; fails on a warning, a dead link or a missing anchor

reference: install  ## write into docs/reference/ what the code says; `make check` says when that isn't current
	$(BIN)/python docs/site/reference.py

check: install $(SITE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python docs/site/reference.py --check
	$(BIN)/python -m tests.ceiling --since $(BASE)
	$(BIN)/python -m tests.wording
	$(BIN)/python -m tests.checkers
	$(BIN)/python -m pytest -q tests/docs/test_site.py tests/typing

bench-before: install  ## what calls cost beside an earlier commit, which has to be in the clone's history
	$(BIN)/python -m tests.bench before

bench: install $(VERL_TESTS)/.installed  ## one table; ratios are of things measured side by side in this run
	VERL_PYTHON=$(CURDIR)/$(VERL_TESTS)/bin/python $(BIN)/python -m tests.bench

COUNT ?= 250
MINUTES ?= 60
chaos: install  ## random programs under random faults, until there are COUNT of each kind; continues docs/internals/chaos.json; then each fault by itself, timed
	$(BIN)/python -m tests.chaos --count $(COUNT) --minutes $(MINUTES)
	$(BIN)/python -m tests.chaos.outages --count $(COUNT) --minutes $(MINUTES)
	$(BIN)/python -m tests.bench faults

mutants: install  ## slips in a copy of core, each of which its test has to find; a quarter of an hour
	$(BIN)/python -m tests.mutants

clusters: install  ## machines out of namespaces, a Slurm, Ray and Dask on them: root, iproute2, util-linux; apt-get install slurm-wlm slurm-wlm-basic-plugins munge
	$(BIN)/python -m pytest tests/clusters

gpu-wheels: install  ## what a machine with a GPU and without a network lacks, for Python 3.12 there: a folder to carry along
	$(BIN)/python -m tests.gpu.wheels gpu-wheels

gpu:  ## tests/gpu on a machine with a GPU, without a network, in nine minutes, or PART=a, b or c of it; results in $OUT, or build/gpu
	$(PYTHON) -m tests.gpu.run $(if $(PART),--part $(PART))

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist gpu-wheels .mypy_cache .pytest_cache .ruff_cache
