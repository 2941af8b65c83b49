# Everything heedful needs is set up by these targets on a machine that has Python (3.11 or newer) and git.
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do if command -v $$p >/dev/null && $$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.heedful-installed

.PHONY: help quickstart test check lint types clean
help:            ## list the targets
	@grep -E '^[a-z]+: .*##|^[a-z]+:  +##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "heedful needs Python 3.11 or newer with the venv module"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python scripts/install.py
	@touch $@

install: $(STAMP)      ## make .venv and install heedful with its test tools

quickstart: $(STAMP)   ## the whole pipeline on SmolLM2-135M, ends with a report (ARGS="--new" and others are passed on)
	$(BIN)/heedful quickstart $(ARGS)

test: $(STAMP)         ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(STAMP)         ## style
	$(BIN)/ruff check src tests scripts

types: $(STAMP)        ## types
	$(BIN)/mypy

check: lint types      ## style and types

clean:                 ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist
