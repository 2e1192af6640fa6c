PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test test-slow lint clean

run: .venv/ready
	$(BIN)/dbcl train

test: .venv/ready
	$(BIN)/pytest

test-slow: .venv/ready
	$(BIN)/pytest -m slow

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist runs src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
