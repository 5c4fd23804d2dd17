# Everything runs in .venv; a second run skips the installation. PIP_FLAGS is handed to every pip install.
PYTHON ?= python3
PIP_FLAGS ?=
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install demo test test-slow check bench

install: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -r requirements.lock
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --no-deps -e .
	touch $@

demo: install
	$(BIN)/python -m deploy.demo $(ARGS)

test: install
	$(BIN)/python -m pytest $(ARGS)

test-slow: install
	$(BIN)/python -m pytest -m slow $(ARGS)

check: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install
	$(BIN)/python -m tests.benchmarks $(ARGS)
