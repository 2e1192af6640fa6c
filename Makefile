PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --constraint constraints.txt

BENCH := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 .venv-bench/bin/python -W ignore
RESULTS ?= benchmarks/results

.PHONY: run test test-slow test-machines test-deploy test-models lint docs notebooks reproduce compare dist bench bench-check clean

# Threads that wait for each other sleep here. By OpenMP's default they spin, and beside other busy programs the same run
# takes several times as long.
run: .venv/run
	$(BIN)/dbcl train

# In as many processes as there are cores; the tests of one module stay together, since they share what is slow to make.
test: .venv/ready
	$(BIN)/pytest -n auto --dist loadscope

test-slow: .venv/ready
	$(BIN)/pytest -n auto --dist loadscope -m 'slow and not deploy'

# The same tests as other CPUs would run them: these variables choose the kernels of NumPy's BLAS and of PyTorch, and
# with them the last bits of results.
MACHINES := OPENBLAS_CORETYPE=Prescott OPENBLAS_CORETYPE=Haswell OPENBLAS_CORETYPE=SkylakeX OPENBLAS_CORETYPE=Zen \
    ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2
test-machines: .venv/ready
	failed=; for machine in $(MACHINES); do \
	    echo "== $$machine"; env $$machine $(BIN)/pytest -q -n auto --dist loadscope || failed="$$failed $$machine"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

test-deploy: .venv/ready
	$(BIN)/pytest -m deploy tests/deploy

# Models of other libraries, in an environment of their own; makes the table of docs/models.md.
test-models: .venv-models/ready
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 .venv-models/bin/python -W ignore tests/models/table.py docs/models.md
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 .venv-models/bin/python -m pytest -q -m models tests/models/test_opacus.py tests/models/test_peft.py

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# An experiment, with its table and figure in results/NAME: make reproduce NAME=table1
reproduce: .venv/ready
	$(BIN)/python -m experiments $(NAME)

# Five defences on the embedded digits, each audited, side by side: results/audit/compare.html.
COMPARED := build/compare
compare: .venv/ready
	train() { name=$$1; shift; $(BIN)/dbcl train --out $(COMPARED)/$$name --seed 0 "$$@" && $(BIN)/dbcl audit $(COMPARED)/$$name --quick; }; \
	train no-defence --preset plain && train paper --preset paper && train blind --preset blind && \
	train dropout --preset paper --sketch sampling-v1 && train noise --preset plain --update-clip 1 --update-noise 0.01
	$(BIN)/dbcl compare $(COMPARED)/no-defence $(COMPARED)/paper $(COMPARED)/blind $(COMPARED)/dropout $(COMPARED)/noise --out results/audit/compare.html

# The notebooks of the documentation, run anew: their outputs are committed.
notebooks: .venv/ready
	cd docs/notebooks && for name in *.ipynb; do OMP_NUM_THREADS=1 ../../$(BIN)/jupyter execute --inplace $$name || exit 1; done

# The site of docs/. Warnings are errors, and nothing is fetched but the packages.
docs: .venv/docs
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs build/docs

# Wheel and sdist, and that the wheel works where nothing else of the repository is.
dist:
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) build
	rm -rf dist build/clean
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv build/clean/env
	build/clean/env/bin/pip install --quiet --constraint constraints.txt dist/*.whl
	cd build/clean && env -u PYTHONPATH env/bin/dbcl --version
	cd build/clean && env -u PYTHONPATH env/bin/dbcl train --rounds 2

bench: .venv-bench/ready
	for name in layers small rounds memory flower secagg; do $(BENCH) benchmarks/$$name.py --out $(RESULTS)/$$name.json || exit 1; done

bench-check:
	$(MAKE) bench RESULTS=build/bench
	.venv-bench/bin/python benchmarks/gate.py build/bench

# What a run needs: the library alone, and compiled only what it imports, which is a small part of what is installed.
.venv/run: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) --no-compile --editable .
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import dbcl.cli, matplotlib.figure'
	touch $@

# What the tests need, which includes what a run needs.
.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) --editable '.[dev]'
	touch .venv/run $@

# What the site needs, besides what the tests need: the reference imports every room.
.venv/docs: .venv/ready
	$(INSTALL) --editable '.[docs]'
	touch $@

# timm and segmentation-models-pytorch read pictures with torchvision and build networks without it: it is not installed.
.venv-models/ready: tests/models/requirements.txt pyproject.toml constraints.txt
	test -x .venv-models/bin/python || $(PYTHON) -m venv .venv-models
	.venv-models/bin/pip install --quiet --constraint constraints.txt --requirement tests/models/requirements.txt --editable .
	.venv-models/bin/pip install --quiet --no-deps timm segmentation-models-pytorch
	touch $@

# pfl-research needs an older dp-accounting than the tests, so the benchmarks have an environment of their own.
.venv-bench/ready: benchmarks/requirements.txt pyproject.toml constraints.txt
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	grep -v '^dp-accounting==' constraints.txt > .venv-bench/constraints.txt
	.venv-bench/bin/pip install --quiet --constraint .venv-bench/constraints.txt --requirement benchmarks/requirements.txt --editable '.[flower]'
	touch $@

# What can be made again. Runs are kept: remove the folder runs by hand.
clean:
	rm -rf .venv .venv-models .venv-bench build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
