# The verbs of this repository. `make test` and `make demo` work on a fresh clone with nothing
# installed but Python 3.11 or newer; everything they install goes into .venv/.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test check fix bench

# The first interpreter on the path that works. A version manager's shim may exist and still fail
# when started, so each candidate is tried, not only found. Override: make test PYTHON=/path/to/python
PYTHON ?= $(shell for python in $$(type -ap python3.11 python3.12 python3.13 python3); do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
		>/dev/null 2>&1 && echo $$python && break; done)
JOBS ?= 2
BIN := .venv/bin

help:  ## Show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: .venv/.installed  ## Make .venv and install the package with its development tools

.venv/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer with venv found on the path." \
		"Install one (on Debian: python3 and python3-venv), or pass PYTHON=..."; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=26'
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: setup  ## Make a small data set, load it, train a tiny model, kill and resume
	$(BIN)/zephon-mm demo

test: setup  ## Run all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -q

check: setup  ## Lint, check the format, check the types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy & $(BIN)/pyright --pythonpath $(BIN)/python; code=$$?; wait $$! && exit $$code

fix: setup  ## Apply what lint and format can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: setup  ## Run the short form of all benchmarks; writes benchmarks/results/REPORT.md
	$(BIN)/python -m benchmarks.reproduce all --short
