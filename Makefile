# Each target makes what it needs, the virtual environment included.
VENV := .venv
PYTHON_IN_VENV := $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help demo test soak check lint types format clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.ready-demo ## load a small checkpoint and continue a prompt
	$(PYTHON_IN_VENV) checkpoints/random_tiny.py build/random-tiny
	$(PYTHON_IN_VENV) -m qwen4jax build/random-tiny --ids 5,6,7,8 --max-new-tokens 32

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

clean: ## remove the virtual environment and all that was built
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
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
