PYTHON ?= python3
BIN := .venv/bin

BENCH := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -W ignore
RESULTS ?= benchmarks/results

.PHONY: run test test-slow test-deploy lint bench bench-check clean

run: .venv/ready
	$(BIN)/dbcl train

test: .venv/ready
	$(BIN)/pytest

test-slow: .venv/ready
	$(BIN)/pytest -m 'slow and not deploy'

test-deploy: .venv/ready
	$(BIN)/pytest -m deploy tests/deploy

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	for name in layers small rounds memory flower; do $(BENCH) benchmarks/$$name.py --out $(RESULTS)/$$name.json || exit 1; done

bench-check:
	$(MAKE) bench RESULTS=build/bench
	$(BIN)/python benchmarks/gate.py build/bench

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist runs src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
