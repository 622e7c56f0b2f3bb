# `make demo` and `make test` set up everything a fresh machine with Python 3.11 needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup demo test test-flower test-cpus test-numbers test-slow test-gpu lint bench clean

setup: $(VENV)/.ready

# What pip installs as torch where there is none: `make setup TORCH="torch==2.12.0"` says which. Without a word a Linux machine
# without a GPU gets a CPU build, from pip's own index if that has one, else from PyTorch's; PyPI's build brings 4 GB of CUDA.
TORCH ?=
PIP_ARGS ?=
PIP := $(BIN)/python -m pip install -q $(PIP_ARGS)
VERSION := torch==2.13.0
CPU_ONLY := $(shell [ "$$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null 2>&1 && echo yes)
CPU_BUILD := $(PIP) $(VERSION)+cpu 2>/dev/null || $(PIP) $(VERSION) --index-url https://download.pytorch.org/whl/cpu || $(PIP) $(VERSION)
INSTALL_TORCH := $(if $(TORCH),$(PIP) $(TORCH),$(if $(CPU_ONLY),$(CPU_BUILD),$(PIP) $(VERSION)))

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(INSTALL_TORCH)
	$(PIP) -e ".[dev]"
	touch $@

demo: setup
	$(BIN)/python -m fallow.demo

test: setup lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup

# Deployed runs. Flower wants older versions of what the command line stands on, so it has an environment of its own, with .venv's packages behind.
FLOWER := $(VENV)-flower
$(FLOWER)/.ready: $(VENV)/.ready
	$(PYTHON) -m venv $(FLOWER)
	$(FLOWER)/bin/python -m pip install -q $(PIP_ARGS) "flwr>=1.41,<1.42"
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > $$($(FLOWER)/bin/python -c "import site; print(site.getsitepackages()[0])")/zz-fallow.pth
	touch $@

test-flower: setup $(FLOWER)/.ready
	PYTHONPATH=$(CURDIR) $(FLOWER)/bin/python -m pytest tests/test_flower*.py

# The whole suite as four CPUs, one after another; their closing lines come last.
test-cpus: setup
	PYTHON=$(BIN)/python tests/cpus.sh

# The tests of numbers as another CPU than this one.
NUMERIC := cbafed central combining compile diversity dma export feddb feddure fedloke fedmatch fedrgd fixmatch fl2 fml house measure \
	methods models norms ops policies proxyfl replay rounds rscfed sage semifed semifl slots sound sparse state supervised views
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
	rm -rf $(VENV) $(FLOWER) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
