# `make demo` and `make test` set themselves up from nothing: Python 3.11+, git and make are enough.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt

.PHONY: help demo test test-fast check format bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.demo ## build the demo bundle and answer three sentences, with speculation on and off
	@$(BIN)/tandemrt export build demo --out engines/built/demo
	@$(BIN)/python -m tools.demo.demo engines/built/demo

test: check ## everything CI runs: lint, types, all tests
	$(BIN)/python -m pytest -n 2

test-fast: $(VENV)/.dev ## the tests that build nothing
	$(BIN)/python -m pytest -n 2 tests/plain

check: $(VENV)/.dev ## ruff (lint and format) and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.dev ## let ruff put the code in order
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.demo ## measure the demo bundle: tokens/s with and without speculation, host time per round
	@test -f engines/built/demo/bundle.json || $(BIN)/tandemrt export build demo --out engines/built/demo
	@$(BIN)/python -m tools.demo.prompts > engines/built/demo-prompts.jsonl
	@$(BIN)/tandemrt bench engines/built/demo --prompts engines/built/demo-prompts.jsonl

clean: ## remove what was built, keep the environment
	rm -rf engines/built build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch goes in first: a range in another package's requirements could pick a larger build of it.
$(VENV)/.torch: constraints.txt
	@echo "setting up $(VENV): the first time takes a few minutes"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@$(PIP) --editable '.[cpu]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@$(PIP) --editable '.[cpu,tensorrt-rtx,dev]'
	@touch $@ $(VENV)/.demo
