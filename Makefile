# Two commands: `make tour` (PyTorch alone) and `make test` (all frameworks). Needs Python 3.11 to 3.13, pip and make.
# `make test-all` adds tests/slow: several processes, MPI, Dask, a browser, tours. `make sweep` runs long property sweeps.
# `make test-oldest` and `make test-newest` run on the oldest and newest versions; `make matrix` on versions of PyTorch.
# Also `make lint`, `make bench` and `make docs` (the site, into site/).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

# Frameworks log to the terminal by default; bfloat16 through oneDNN dies on some CPUs beyond AVX2.
export TF_CPP_MIN_LOG_LEVEL ?= 3
export ONEDNN_MAX_CPU_ISA ?= AVX2

.PHONY: tour test test-all test-oldest test-newest matrix sweep lint bench docs package clean

tour: $(VENV)/tour.stamp
	@$(BIN)/elementgrad tour

# K selects tests by expression, as in `make test K=selection`.
test: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n 2 --ignore=tests/slow $(if $(K),-k "$(K)")

test-all: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n 2 $(if $(K),-k "$(K)")

# On Python 3.11, and on 3.13 or 3.12. Their builds of PyTorch are those of PyPI, which take about 8 GB of disk each.
test-oldest test-newest: test-%: .venv-%/stamp
	.venv-$*/bin/python -m pytest -n 2 --ignore=tests/slow $(if $(K),-k "$(K)")

# By hand: installs several gigabytes for each version, one after the other. TORCH="2.8.0 2.9.1" chooses versions.
matrix:
	python=$$(tools/find_python 3.11) && $$python tools/matrix.py $(TORCH)

# More examples of every property test, and interrupts at far more lines. Takes an hour or more.
sweep: $(VENV)/test.stamp
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -n 2 -k "$(if $(K),$(K),made or random or flipped or of_hessians_are or interrupt)"

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The wheel and the source distribution, into dist/.
package: $(VENV)/test.stamp
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

bench: $(VENV)/bench.stamp
	$(BIN)/python -m benchmarks $(ARGS)

# Strict: a warning, such as a link to nowhere, is an error. Nothing is fetched, and no framework is needed.
docs: .venv-docs/stamp
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --clean --quiet

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest .venv-docs site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/tour.stamp: locks/tour.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r locks/tour.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/test.stamp: locks/test.txt $(VENV)/tour.stamp
	$(PIP) -r locks/test.txt
	@touch $@

$(VENV)/bench.stamp: locks/bench.txt $(VENV)/test.stamp
	$(PIP) --no-deps -r locks/bench.txt
	@touch $@

# Most of their 20 000 files are never imported, so compiling them all would take minutes for nothing.
.venv-oldest/stamp: PYTHONS := 3.11
.venv-newest/stamp: PYTHONS := 3.13 3.12
.venv-oldest/stamp .venv-newest/stamp: .venv-%/stamp: locks/%.txt pyproject.toml
	python=$$(tools/find_python $(PYTHONS)) && $$python -m venv .venv-$*
	.venv-$*/bin/pip install --quiet --no-cache-dir --no-compile --disable-pip-version-check -r locks/$*.txt
	.venv-$*/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

.venv-docs/stamp: locks/docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check -r locks/docs.txt
	@touch $@
