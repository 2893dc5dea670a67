# `make help` lists what there is.
SPEC ?= fmha
ARCH ?=
ARGS ?=
LIMIT_S ?= 60

TUNEKIT = .venv/bin/tunekit
PYTEST = .venv/bin/python -m pytest
arch = $(if $(ARCH),--arch $(ARCH))

.DEFAULT_GOAL := help
.PHONY: help setup sweep test test-slow test-fit test-peers test-gpu check lint bench

help: ## Show this
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20
	@echo 'Variables: SPEC, ARCH, LIMIT_S, and ARGS, which goes on to the command: make sweep ARGS="--budget 4"'

setup: ## Build .venv from pyproject.toml (quick when nothing changed)
	@sh scripts/setup.sh

sweep: setup ## Tune SPEC, 12 variants a problem unless ARGS says else: without a GPU, cross-compile it for sm_100a
	$(strip $(TUNEKIT) sweep $(SPEC) $(arch) $(if $(ARGS),$(ARGS),--budget 12 --search random))

test: setup ## Run the tests that need no GPU, two files at a time
	$(PYTEST) -n 2 --dist loadfile -m "not slow and not gpu" $(ARGS)

test-slow: setup ## Run the tests that need no GPU, the long ones too
	$(PYTEST) --unspared -m "not gpu and not fit" $(ARGS)

test-fit: setup ## Compare what every attention variant declares with its trace, and of a sample with its code
	$(PYTEST) tests/kernels/test_fit.py -m fit -s $(ARGS)

test-peers: setup ## Simulate flash-attn-4's, quack's and CUTLASS's kernels (installs the extra "peers")
	.venv/bin/python -m pip install --quiet -e '.[peers]'
	$(PYTEST) tests/peers $(ARGS)

test-gpu: setup ## Run the tests that need an NVIDIA GPU
	$(PYTEST) -m gpu tests/gpu $(ARGS)

check: setup ## Check that the shipped specs' compile times stay under LIMIT_S seconds
	$(strip $(TUNEKIT) check compile-time --limit-s $(LIMIT_S) $(arch) $(ARGS))

lint: setup ## Run ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

bench: setup ## Measure the figures that the README quotes; attention's need a GPU
	@for name in startup store isolation simulate $(if $(shell nvidia-smi -L 2>/dev/null),attention); do \
	    echo "== $$name"; .venv/bin/python benchmarks/$$name.py || exit 1; done
