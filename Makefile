# make demo | test | coverage | check | matrix | fuzz | faults | bench | docs | man | wheel | clean; everything installs itself into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs

# One thread a process: the networks here are tiny, and on busy cores more threads only wait for each other.
export OMP_NUM_THREADS := 1

# Images of machines often set it; every process that imports torch would then compile torch again, for three seconds.
unexport PYTHONDONTWRITEBYTECODE

# Tests run in so many processes, each file in one of them: its tests share what is made once.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.PHONY: install demo test coverage check matrix fuzz faults format bench fixtures pictures docs man wheel clean

install: $(STAMP)

# Installs once, and again only when the requirements change. Python compiles what is imported, a small part of all files.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev,train]'
	touch $(STAMP)

demo: install
	$(BIN)/python -m docs.demo

test: install
	$(PYTEST) -m "not matrix"

# Lines and branches that the tests reach, processes that they start included, into htmlcov/; of a part: TESTS=tests/formats.
coverage: install
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -n $(WORKERS) --dist loadfile -m "not matrix" $(TESTS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage html --quiet
	$(BIN)/python -m coverage report

matrix: install
	$(PYTEST) -m matrix

# A minute of mutated files; more with FUZZ="--seconds 3600 --seed 1" (python -m tests.fuzz --help).
fuzz: install
	$(BIN)/python -m tests.fuzz $(FUZZ)

# Every system call of everything that writes fails once in every way: thousands of runs, some minutes.
faults: install
	$(BIN)/python -m tests.faults

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) test

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python -m tests.benchmarks

fixtures: install
	$(BIN)/python fixtures/make.py

pictures: install
	$(BIN)/python -m docs.pictures

# The site goes to site/; a broken link or a page outside the nav is an error.
docs: $(DOCS_STAMP)
	$(BIN)/python -m mkdocs build --strict --quiet

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $(DOCS_STAMP)

# ckpt.1, ckpt-inspect.1 ... from --help, into man/; `make wheel` puts them into the wheel, so that `man ckpt` finds them.
man: install
	$(BIN)/python -m docs.man

wheel: man
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --disable-pip-version-check -w dist .

# dist/ckpt.pyz, all of `ckpt` but PyTorch in one file for any Python from 3.11 on, and its SHA-256.
.PHONY: pyz
pyz: install
	$(BIN)/python -m docs.pyz

# What is published (wheel, source archive, one file), built and tried in environments of its own. It downloads PyTorch.
.PHONY: release-check
release-check: man
	$(BIN)/python -m docs.release_check

clean:
	rm -rf $(VENV) build dist site man htmlcov .coverage* *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
