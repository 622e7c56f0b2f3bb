# `make demo` and `make test` set up everything a fresh machine with Python 3.11 needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup demo test test-cpus test-numbers test-slow test-gpu lint bench clean

setup: $(VENV)/.ready

# A CPU build of torch is taken first where there is none: a bare range would pull gigabytes of CUDA.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q -e ".[dev]"
	touch $@

demo: setup
	$(BIN)/python -m fallow.demo

test: setup lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup

# The whole suite as four CPUs, one after another; their closing lines come last.
test-cpus: setup
	PYTHON=$(BIN)/python tests/cpus.sh

# The tests of numbers as another CPU than this one.
NUMERIC := combining compile diversity dma export feddb feddure fedloke fedrgd fixmatch house measure methods models norms ops \
	replay rounds semifl slots sound state views
test-numbers: setup
	PYTHON=$(BIN)/python tests/cpus.sh sse41 -- $(NUMERIC:%=tests/test_%.py)

test-slow: setup
	$(BIN)/python -m pytest -m slow

# With the interpreter that is there and no installs: GPU machines often allow none.
test-gpu:
	$(PYTHON) -m pytest -m gpu -p no:cacheprovider

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
