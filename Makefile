# setup: a virtual environment with everything; one that has a dtensor of your own (pip install .)
#   is used as it is, and nothing is installed into it;  demo: train a small GPT on four actors;
# test: the default set of tests, which CI runs; with ARGS=--cpu it prints the seconds of a core that
#   each test, fixture and file took;  quick: the default set without Ray, before each commit;
# test-all: every test, also the slow ones: before a release and every night;
# plain: test-all without the three replacements that make tests cheap (CONTRIBUTING.md): hours;
# sweep: the cases that the tests only sample;
# docs: the pages as a site, docs/_build/html/index.html, where any warning is an error;
# replay: plans and programs of a fixed corpus, here and at another commit (ARGS="--base HEAD~3"),
#   and each difference;
# check: all that CI runs;  certify: every rule by brute force, and its table;
# opinfo: PyTorch's OpInfo database under placements, and its table;
# versions: capture, rules and Ray with each torch and each Python that is supported, and their table;
# hf: every family of models of transformers over two ranks, and its table;
# chaos: hundreds of launches that end in every way, none of which may leave anything behind; with
#   ARGS="--recover 200 --disk 40 --seed 0" faults on purpose: ranks killed, stopped, cut
#   off, delayed, raising; full disks, torn checkpoints, killed controllers; and their table;
# integrations: loops of Trainer, SFTTrainer, accelerate, Lightning and lm-eval, in an environment of
#   their own with pinned versions, and their table; pip takes torch from where `make setup` does;
# gpus: all that runs on CUDA, on simulated GPUs under 20 seeds, and what is found where a wait of ours
#   is left out (ARGS="--seeds 3 schedule": fewer);
# gpu: all that is to run where there is a GPU, right first, in parts of at most eight minutes, and a
#   table for each in build/gpu; it installs nothing (ARGS="--list": the parts; ARGS="--part 3 ray":
#   some of them; ARGS="--simulated 2": on simulated GPUs);
# kernels: all cases of the kernels in Triton's interpreter, the bytes that they
#   move, the widths of their whole numbers, and their machine code.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INTEGRATIONS ?= build/integrations_env
# Worker processes for the tests; 0 runs them one after the other in this process.
JOBS ?= 2
DEMO ?= --placements tp2pp2 --backend ray --compare
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
ALL := not gpu and not sweep
# More than one OpenMP thread per process collapses as soon as processes share the cores.
export OMP_NUM_THREADS := 1
# Python keeps what it compiles: without it, each process that tests start compiles dtensor again.
export PYTHONDONTWRITEBYTECODE :=

# Succeeds where dtensor is installed and not editable.
INSTALLED = $(BIN)/python -Ic "import importlib.metadata as m, sys; \
	sys.exit('\"editable\"' in (m.distribution('dtensor').read_text('direct_url.json') or ''))"

.PHONY: setup demo test test-all quick plain sweep lint docs check replay certify opinfo versions hf integrations chaos gpus gpu kernels format
.DEFAULT_GOAL := check

setup: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if $(INSTALLED) 2>/dev/null; then \
		echo "$(VENV) has a dtensor that is not editable: it is left as it is."; \
		echo "fix: if a package is missing, add VENV=build/env, which make sets up"; \
	else $(BIN)/python -m pip install --quiet -e '.[dev]' && touch $@; fi

demo: setup
	$(BIN)/python examples/train_gpt.py $(DEMO)

test: setup
	$(PYTEST) $(ARGS)

test-all: setup
	$(PYTEST) -m "$(ALL)" $(ARGS)

quick: setup
	$(PYTEST) -m "not slow and not ray and not gpu and not sweep" $(ARGS)

plain: setup
	$(PYTEST) -m "$(ALL)" --plain $(ARGS)

sweep: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist load -m sweep $(ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

docs: setup
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html

check: lint docs
	$(MAKE) test

replay: setup
	$(BIN)/python -m tests.replay $(ARGS)

# Torch warns in C++ about statistics of empty shards, thousands of times.
certify: setup
	TORCH_CPP_LOG_LEVEL=ERROR $(BIN)/python -m tests.certify --table docs/certified.md

versions: setup
	$(BIN)/python -m tests.versions --jobs $(JOBS) $(ARGS)

hf: setup
	$(BIN)/python -m tests.huggingface_sweep --jobs $(JOBS)

integrations: $(INTEGRATIONS)/.stamp
	PYTHONPATH=. $(INTEGRATIONS)/bin/python -m tests.integrations $(ARGS)

$(INTEGRATIONS)/.stamp: pyproject.toml tests/integrations/requirements.txt
	test -x $(INTEGRATIONS)/bin/python || $(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet -e . -r tests/integrations/requirements.txt
	touch $@

opinfo: setup
	$(BIN)/python -m tests.opinfo --jobs $(JOBS)

chaos: setup
	$(BIN)/python -m tests.chaos $(ARGS)

gpus: setup
	$(BIN)/python -m tests.testing.gpus.matrix $(ARGS)
	$(BIN)/python -m tests.testing.gpus.matrix --graphs $(ARGS)
	$(BIN)/python -m tests.testing.gpus.waits
	$(BIN)/python -m tests.testing.gpus.mutations

# Without setup: nothing is installed, and where there is a GPU its torch may be in another Python.
gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m tests.gpu $(ARGS)

kernels: setup
	$(BIN)/python -m tests.kernels.sweep
	$(BIN)/python -W ignore -m tests.kernels.moved
	$(BIN)/python -m tests.kernels.widths
	$(BIN)/python -m benchmarks.kernels --aot --write

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
