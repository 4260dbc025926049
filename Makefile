# `make help` lists what there is. Each target installs what it needs into .venv first.
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

.PHONY: help install demo test lint coverage check fuzz faults format bench fixtures golden net newer pictures docs man wheel pyz release-check clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

install: $(STAMP)  ## what everything else needs, into .venv

# Installs once, and again only when the requirements change. Python compiles what is imported, a small part of all files.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev,train]'
	touch $(STAMP)

demo: install  ## train on two processes, strip the names, load, see the same accuracy
	$(BIN)/python -m docs.demo

test: install  ## all tests, in two processes (WORKERS=8 for more)
	$(PYTEST)

# Lines and branches that the tests reach, processes that they start included, into htmlcov/; of a part: TESTS=tests/formats.
coverage: install  ## lines and branches that the tests reach; of a part: TESTS=tests/formats
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -n $(WORKERS) --dist loadfile $(TESTS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage html --quiet
	$(BIN)/python -m coverage report

# A minute of mutated files; more with FUZZ="--seconds 3600 --seed 1" (python -m tests.fuzz --help).
fuzz: install  ## a minute of mutated files; longer: FUZZ="--seconds 3600 --seed 1"
	$(BIN)/python -m tests.fuzz $(FUZZ)

# Every system call of everything that writes fails once in every way: thousands of runs, some minutes.
faults: install  ## each system call of all that writes fails in every way, minutes
	$(BIN)/python -m tests.faults

lint: install  ## ruff, and mypy strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test  ## lint, then the tests

format: install  ## ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install  ## the figures of docs/benchmarks.md, side by side
	$(BIN)/python -m tests.benchmarks

fixtures: install  ## fixtures/ again, by torch itself
	$(BIN)/python fixtures/make.py

golden: install  ## tests/golden/kept again: what commands and functions say; read the diff
	$(BIN)/python -m tests.golden

# What must not change while the code does. These files import the public face and tests/support alone.
NET := tests/golden tests/net \
	tests/test_fixtures.py tests/test_properties.py \
	tests/edit/test_losses.py tests/edit/test_slim.py \
	tests/formats/test_consolidated.py tests/formats/test_every_container.py tests/formats/test_exported_programs.py \
	tests/formats/test_flax_and_onnx.py tests/formats/test_keras.py tests/formats/test_loose_shards.py \
	tests/formats/test_megatron.py tests/formats/test_numpy_files.py tests/formats/test_oracle.py \
	tests/formats/test_part_fixtures.py tests/formats/test_partial.py tests/formats/test_parts_compose.py \
	tests/formats/test_parts_into_folders.py tests/formats/test_torch_dist.py \
	tests/hostile/test_hostile_adapters.py tests/hostile/test_hostile_files.py \
	tests/hostile/test_hostile_legacy.py tests/hostile/test_hostile_parts.py tests/hostile/test_hostile_quantised.py \
	tests/hostile/test_hostile_readings.py tests/hostile/test_hostile_tensors.py tests/hostile/test_hostile_zips.py \
	tests/operations/test_convert_lora.py tests/operations/test_lora_names.py tests/operations/test_show.py \
	tests/render/test_look.py \
	tests/torch/test_load_hooks.py tests/torch/test_prove.py \
	tests/torch/test_torch.py

net: install  ## golden files, oracles, tables and genuine folders alone
	$(PYTEST) $(NET)

# The newest torch there is pulls gigabytes of CUDA libraries: by hand, before a release. NEWER="torch==2.14.1" for another.
NEWER ?= torch
newer:  ## the tests with the newest torch, in .venv-newer
	test -x .venv-newer/bin/python || $(PYTHON) -m venv .venv-newer
	.venv-newer/bin/python -m pip install --quiet --disable-pip-version-check --upgrade $(NEWER) -e '.[dev,train]'
	.venv-newer/bin/python -m pytest -n $(WORKERS) --dist loadfile

pictures: install  ## docs/images again, from real commands
	$(BIN)/python -m docs.pictures

# The site goes to site/; a broken link or a page outside the nav is an error.
docs: $(DOCS_STAMP)  ## the site, in site/
	$(BIN)/python -m mkdocs build --strict --quiet

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $(DOCS_STAMP)

# ckpt.1, ckpt-inspect.1 ... from --help, into man/; `make wheel` puts them into the wheel, so that `man ckpt` finds them.
man: install  ## the man pages, from --help
	$(BIN)/python -m docs.man

wheel: man  ## the wheel, in dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --disable-pip-version-check -w dist .

pyz: install  ## dist/ckpt.pyz, ckpt in one file without PyTorch, and its SHA-256
	$(BIN)/python -m docs.pyz

release-check: man  ## build what is published, into dist/release/, and try it in new environments
	$(BIN)/python -m docs.release_check

clean:  ## remove all that make made
	rm -rf $(VENV) build dist site man htmlcov .coverage* *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
