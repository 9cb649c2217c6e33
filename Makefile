# `make` alone lists the targets. Every target installs what it needs below this folder.
PYTHON ?= python3
UV_VERSION := 0.13.8
UV := .tools/bin/uv
BIN := .venv/bin
# As many files side by side, with a thread each, and those that take long first.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest tests/local tests/golden tests/unit tests/extensions -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=15
# All stages are forks of one process that has imported their libraries.
WARM := -p tests.warm
INSTALLED := .venv/.installed
RUN ?= demo
SEED ?= 0
# For each of 18 requests: five minutes.
FUZZ_SECONDS ?= 17
# Threads that spin while they wait steal the cores of the process next door.
export OMP_WAIT_POLICY ?= PASSIVE

# As many as the pods of a cluster on this machine have: the bits of a sum depend on it. (`tuneloop demo` takes one.)
bench test-cluster: export OMP_NUM_THREADS ?= 2

.DEFAULT_GOAL := help
.PHONY: help install demo smollm2 demo-smollm2 test lint fuzz fuzz-judges mutations test-unit test-local test-slow test-cluster test-all bench golden parity pictures notebooks certify requirements images clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(UV):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tuneloop needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .tools
	.tools/bin/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

$(INSTALLED): requirements/dev.txt requirements/fixtures.txt requirements/kfp-backend.txt pyproject.toml | $(UV)
	@echo 'installing about 7.5 GB of packages into .venv, which is silent for a minute or more'
	test -x $(BIN)/python || $(UV) venv --quiet --python $(PYTHON) .venv
	# Bytecode, also where PYTHONDONTWRITEBYTECODE is set: without it programs take two or three times as long to start.
	$(UV) pip install --quiet --python .venv --require-hashes --no-deps --compile-bytecode -r requirements/dev.txt
	$(UV) pip install --quiet --python .venv --require-hashes --no-deps -r requirements/fixtures.txt
	# KFP's metadata store, for tests by its rules, is there for Python 3.11 alone.
	if $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then \
	  $(UV) pip install --quiet --python .venv --require-hashes --no-deps -r requirements/kfp-backend.txt; fi
	$(UV) pip install --quiet --python .venv --no-deps --editable .
	$(BIN)/python -m compileall -q components pipelines
	touch $@

install: $(INSTALLED) ## make .venv with everything (hashed requirements; about 7.5 GB)

demo: $(INSTALLED) ## SFT, then a GRPO loop with real vLLM on this CPU, evaluated before and after, with a report
	$(BIN)/tuneloop demo --run $(RUN) --set seed=$(SEED)

smollm2: $(INSTALLED) ## make a model directory of SmolLM2-135M-Instruct in .venv/models/smollm2 (269 MB, bfloat16)
	$(BIN)/python -m tests.pretrained .venv/models/smollm2

demo-smollm2: smollm2 ## teach that model sums of reasoning-gym: LoRA, evaluated before and after; seven to nine minutes on two busy cores
	$(BIN)/tuneloop run sft -c docs/samples/smollm2.yaml --run smollm2-$(SEED) --set seed=$(SEED)

test: lint ## lint, unit tests, and of each kind one whole loop: at most ten minutes on two cores
	$(PYTEST) $(WARM) -m "not slow"

lint: $(INSTALLED) ## ruff, mypy, import rules, golden files of the requirements
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-all: test test-slow test-cluster ## every tier; the last needs a cluster

fuzz: $(INSTALLED) ## five minutes of broken bodies for the requests of the servers, some thousand in all
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/pytest tests/extensions/gateway tests/unit/inference -k test_fuzz -rfEP

fuzz-judges: $(INSTALLED) ## 10,000 generated answers for each judge, also those that run programs (an hour)
	FUZZ_ANSWERS=10000 OMP_NUM_THREADS=1 $(BIN)/pytest -m slow tests/unit/rewards/test_fuzz.py -v

mutations: $(INSTALLED) ## 10,000 changes of the files of a run, and what each reader made of them
	$(BIN)/python -m tests.mutations $(COUNT)

certify: $(INSTALLED) ## 1,000 faults at the calls of store and executor; each run is resumed, and ends as the undisturbed one (CERTIFY=--cluster: on a cluster)
	$(BIN)/python -m tests.certify --seed $(SEED) $(CERTIFY)

test-unit: $(INSTALLED) ## what needs no engine and no whole loop
	$(PYTEST) -m "not local"

test-local: $(INSTALLED) ## whole loops, real vLLM, notebooks: those of `make test` and the slow ones
	$(PYTEST) $(WARM) --warm-vllm -m local

test-slow: $(INSTALLED) ## of these, those that `make test` leaves out
	$(PYTEST) $(WARM) --warm-vllm -m slow

CLUSTER_TESTS ?= tests/cluster
CLUSTER_TIER ?= cluster
test-cluster: $(INSTALLED) ## needs a cluster that KUBECONFIG names, with `make images` done
	$(BIN)/pytest $(CLUSTER_TESTS) -m "$(CLUSTER_TIER)" -v --durations=15

bench: $(INSTALLED) ## ours beside a peer, measured in the same run (not scale.py, which needs simulated nodes, nor on_gpu.py, which needs a GPU)
	for bench in $(filter-out benchmarks/scale% benchmarks/on_gpu.py,$(wildcard benchmarks/*.py)); do PYTHONPATH=. $(BIN)/python $$bench || exit 1; done
	$(BIN)/python benchmarks/sft_tokens.py --scaling

golden: $(INSTALLED) ## rewrite the golden files after a wanted change
	$(BIN)/pytest tests/golden --update-golden

PARITY ?=
parity: $(INSTALLED) ## the tests that docs/parity.md names; a row without a passing one fails
	$(BIN)/pytest $(WARM) --warm-vllm -p tests.parity $(PARITY)

pictures: $(INSTALLED) ## take the pictures of docs/ui.md anew, with Chromium (apt-get install chromium)
	PYTHONPATH=. $(BIN)/python docs/images/pages.py

NOTEBOOKS ?=
notebooks: $(INSTALLED) ## run them, and keep what they print and draw (02 needs a cluster; NOTEBOOKS=FILE for one)
	PYTHONPATH=. $(BIN)/python tests/notebooks.py $(NOTEBOOKS)

requirements: | $(UV) ## compile requirements/*.txt anew
	requirements/compile.sh $(UV)

images: ## container images, with docker, buildah, or what BUILDER names
	images/build.sh

clean: ## remove what make installed; runs stay
	rm -rf .venv .tools
