# Each target makes what it needs, the virtual environment included.
VENV := .venv
# torch and transformers, which nothing else here needs
PARITY_VENV := .venv-parity
PARITY_PYTHON := $(PARITY_VENV)/bin/python
# an environment that is there already needs no making: make PARITY_PYTHON=/path/to/python parity
PARITY_READY = $(if $(filter $(PARITY_VENV)/%,$(PARITY_PYTHON)),$(PARITY_VENV)/.ready)
TORCH_INDEX := https://download.pytorch.org/whl/cpu
PYTHON_IN_VENV := $(VENV)/bin/python

# a short beginning; SAMPLING= continues it greedily, which soon repeats itself
SAMPLING := --temperature 0.7 --top-p 0.95 --seed 1
define DEMO_PROMPT
import os
import sys
import argparse


def main(argv=None):
    parser = argparse.ArgumentParser(
endef
export DEMO_PROMPT

.DEFAULT_GOAL := help
.PHONY: help demo parity test soak check lint types format clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.ready-demo ## continue a prompt with the checkpoint that comes along
	$(PYTHON_IN_VENV) -m qwen4jax --max-new-tokens 192 $(SAMPLING) "$$DEMO_PROMPT"

parity: $(VENV)/.ready-demo $(PARITY_READY) ## compare its logits with those of transformers
	$(PYTHON_IN_VENV) checkpoints/parity.py ours build/parity.npz
	$(PARITY_PYTHON) checkpoints/parity.py theirs build/parity.npz

test: $(VENV)/.ready-dev ## run the test suite (CPU; warnings are errors)
	$(PYTHON_IN_VENV) -m pytest -n 2 --dist worksteal

soak: $(VENV)/.ready-dev ## 2,000 requests of 64 clients against a server (minutes)
	$(PYTHON_IN_VENV) -m tests.serve.soak --requests 2000 --clients 64

check: lint types ## everything CI checks besides the tests

lint: $(VENV)/.ready-dev ## ruff: rules and formatting
	$(PYTHON_IN_VENV) -m ruff check
	$(PYTHON_IN_VENV) -m ruff format --check

types: $(VENV)/.ready-dev ## pyright
	$(PYTHON_IN_VENV) -m pyright --pythonpath $(PYTHON_IN_VENV)

format: $(VENV)/.ready-dev ## rewrite the sources in the project's format
	$(PYTHON_IN_VENV) -m ruff check --fix
	$(PYTHON_IN_VENV) -m ruff format

clean: ## remove the virtual environments and all that was built
	rm -rf $(VENV) $(PARITY_VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# A stamp is younger than pyproject.toml when its extras are installed: then make does nothing.
$(VENV)/.ready-demo: EXTRAS :=
$(VENV)/.ready-dev: EXTRAS := [dev,serve]
$(VENV)/.ready-%: pyproject.toml | $(VENV)/bin/pip
	$(PYTHON_IN_VENV) -m pip install --quiet --editable '.$(EXTRAS)'
	touch $@

# venv writes bin/pip last: a folder without it is an interrupted attempt, made anew.
$(VENV)/bin/pip:
	python=$$(bash .ci/find-python) && "$$python" -m venv --clear $(VENV)

# the CPU's torch first: what the extra asks for is there then, without gigabytes for a GPU
$(PARITY_VENV)/.ready: pyproject.toml
	python=$$(bash .ci/find-python) && "$$python" -m venv --clear $(PARITY_VENV)
	$(PARITY_VENV)/bin/pip install --quiet torch --index-url $(TORCH_INDEX)
	$(PARITY_VENV)/bin/pip install --quiet --editable '.[hf]'
	touch $@
