# Everything runs from a bare clone: the first target that needs it creates .venv and installs into it.
#
#   make demo     a real model in three sizes beside other ways to ship it: a table, its picture, a search, a report
#   make test     the tests of every change, doctests and documentation examples included
#   make sweep    the slow tests and the long tables of cases; SAMPLE=40 SEED=1 runs 40 of them, drawn by seed
#                 without SAMPLE also the numerics under other CPU settings
#   make versions each supported Python and transformers that is here, and the oldest and newest packages
#   make release  wheel and sdist in dist/, checked and tried in an empty environment; publishes nothing
#   make lint     ruff and mypy
#   make bench    every benchmark, one table each
#
# On Linux PyPI's torch brings CUDA libraries of several GB. To get the small CPU build instead:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH_INDEX ?=
DEMO_OUT ?= demo-out
DEMO_SIZES ?= 20MB,8MB,6MB
# Processes that compress; two take 4 GB of memory.
DEMO_WORKERS ?= 2
PYTEST_ARGS ?=
SAMPLE ?=
SEED ?= 0

BIN := .venv/bin
# --no-compile: Python compiles what it imports, which is a small part of torch and transformers.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt \
       $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# Where this is set, every process compiles transformers and torch anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test sweep versions release lint format bench clean
.DELETE_ON_ERROR:

demo: .venv/.demo
	$(BIN)/kflats demo --out $(DEMO_OUT) --sizes $(DEMO_SIZES) --workers $(DEMO_WORKERS) --force

# One process a core: small tensors gain nothing from threads, and threads of several processes disturb each other.
test: .venv/.dev
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" $(PYTEST_ARGS)

sweep: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m slow \
	    $(if $(SAMPLE),--sample $(SAMPLE) --sample-seed $(SEED)) $(PYTEST_ARGS)
	$(if $(SAMPLE),,$(BIN)/python tests/cpu_sweep.py)

versions: .venv/.dev
	TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python tests/versions.py

release: .venv/.dev
	TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python tests/release.py

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.dev
	@for script in benchmarks/[a-z]*.py; do \
	    case $$script in */_*|*/code_lines.py|*/seams.py|*/gaussian_bound.py) continue;; esac; \
	    echo "== $$script"; $(BIN)/python $$script || exit 1; \
	done

$(BIN)/python:
	$(PYTHON) -m venv .venv

# The stamps are newer than pyproject.toml and constraints.txt exactly when nothing needs installing.
.venv/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[demo]"
	@touch $@

.venv/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[dev]"
	@touch $@ .venv/.demo

clean:
	rm -rf .venv build dist $(DEMO_OUT) .pytest_cache .mypy_cache .ruff_cache .hypothesis
