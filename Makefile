# Everything that can be done from a fresh checkout with Python >= 3.11 and make. `make help` lists it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMP := $(VENV)/.installed
# All branches of these are covered, by tests of their own.
SANS_IO := aiokv.core aiokv.policy aiokv.wire

# In CI the order of the tests is the same every time; elsewhere each run has another one, which it prints.
PYTEST_FLAGS ?= $(if $(CI),--randomly-seed=1)
# On all CPUs, though no more than 8: each process imports PyTorch and compiles kernels of its own.
PYTEST_PROCESSES ?= --numprocesses=logical --maxprocesses=8 --dist=worksteal
CHAOS_MINUTES ?= 2
# Interpreters to look at besides those on the path: what pyenv has installed.
PYTHONS ?= $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.1[1-9]*/bin/python)

# An activated environment, or a user's pip settings, must not lead the installation elsewhere.
unexport VIRTUAL_ENV PYTHONHOME PYTHONPATH PIP_PREFIX PIP_TARGET PIP_USER
# Bytecode is kept: without it each of the hundreds of processes that tests start would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two steps at a time would mix their output.
.NOTPARALLEL:

.PHONY: help
help: ## list what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' Makefile

.PHONY: venv
venv: $(STAMP) ## make the virtual environment in .venv

# The stamp holds the folder's path: what was moved or copied from elsewhere is made again.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "aiokv needs Python >= 3.11, but '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)." \
		"Name another one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "'$(PYTHON)' has no venv module. Install it, on Debian and Ubuntu with: apt-get install python3-venv" >&2; exit 1; }
	@if test -e $(STAMP) && test "$$(cat $(STAMP))" != "$(CURDIR)" || \
		! $(PY) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
		then $(PYTHON) -m venv --clear $(VENV); fi
	$(PY) -m pip install --quiet --upgrade 'pip>=25.1'
	$(PY) -m pip install --quiet --editable '.[all,examples]' --group dev
	@echo "$(CURDIR)" > $(STAMP)

UNIT = $(PY) -m pytest $(SANS_IO:%=--cov=%) --cov-fail-under=100 $(PYTEST_PROCESSES) $(PYTEST_FLAGS)
CHAOS = $(BIN)/aiokv chaos --minutes $(CHAOS_MINUTES) --workers 4 --servers 3 --kill worker,server,scheduler --seed 1

# Chaos waits most of the time, so it runs beside the tests, and what it has said is shown after them.
.PHONY: test
test: lint types imports docs ## lint, types, imports, docs, tests, coverage and chaos: all that CI runs
	@echo "$(CHAOS) &"; $(CHAOS) >$(VENV)/chaos.log 2>&1 & chaos=$$!; trap 'kill $$chaos; exit 1' INT TERM; \
		echo "$(UNIT)"; $(UNIT); unit=$$?; wait $$chaos; chaos=$$?; \
		cat $(VENV)/chaos.log; test $$unit -eq 0 && test $$chaos -eq 0

.PHONY: lint
lint: $(STAMP) ## check style, format and spelling
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell

.PHONY: types
types: $(STAMP) ## check types
	$(PY) -m mypy

.PHONY: imports
imports: $(STAMP) ## check who imports whom
	$(BIN)/lint-imports --no-logo

.PHONY: unit
unit: $(STAMP) ## run the tests on all CPUs, and check that they cover the state machines
	$(UNIT)

.PHONY: versions
versions: $(STAMP) ## compare runs of the simulator under all Pythons from 3.11 to 3.13 that are found
	$(PY) -m tox run --quiet $(if $(PYTHONS),--discover $(PYTHONS))
	$(PY) -m pytest tests/sim/test_sim_versions.py $(PYTEST_FLAGS)

.PHONY: coverage
coverage: $(STAMP) ## show what the tests cover of everything; takes twice as long as they do
	$(PY) -m pytest --cov $(PYTEST_PROCESSES) $(PYTEST_FLAGS)

.PHONY: chaos
chaos: $(STAMP) ## harm a real cluster for CHAOS_MINUTES, and compare the bits that it ends with
	$(CHAOS)

.PHONY: fuzz
fuzz: $(STAMP) ## look for bytes that break the wire, for ten minutes
	$(PY) tests/wire/fuzz.py -max_total_time=600 tests/wire/corpus

.PHONY: fuzz-sim
fuzz-sim: $(STAMP) ## run 2,000 random scenarios of the simulator with all checks
	$(BIN)/aiokv sim fuzz --seeds 0..1999

.PHONY: format
format: $(STAMP) ## put imports and format right
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: demo
demo: $(STAMP) ## run the demo
	$(PY) examples/demo.py

.PHONY: docs
docs: $(STAMP) ## build the documentation in docs/_build
	$(PY) -m sphinx -q -W --keep-going -b html docs docs/_build
	@echo "Open docs/_build/index.html."

.PHONY: clean
clean: ## remove the environment and everything that was built
	rm -rf $(VENV) .tox build dist docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
