# Everything a developer types. `make help` lists it; each target sets up its own environment (.ci/env).
SHELL := bash
.DEFAULT_GOAL := help
export PYTHONSAFEPATH := 1
# Two busy processes with two threads each are 5-10 times slower than with one each.
export OMP_NUM_THREADS ?= 1
# Files are shared out among so many test processes, and among so many clusters; 0 and 1 are for a debugger.
WORKERS ?= 2
CLUSTERS ?= 3
BIN = $$(.ci/env)

.PHONY: help setup demo test test-gpu test-cluster test-faults cluster check format bench
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Create .venv (the heavy part is shared and cached outside the checkout)
	@bin=$(BIN) && echo "ready: source $${bin#$(CURDIR)/}/activate"

demo: ## Serve, replay, tune and report on this machine, in under 12 minutes
	@bin=$(BIN) && exec "$$bin/python" examples/demo.py

test: ## Run all tests that need no cluster (WORKERS=2 side by side)
	@bin=$(BIN) && "$$bin/pytest" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-gpu: ## Run the tests that need a CUDA device
	@bin=$(BIN) && "$$bin/pytest" -m gpu tests/gpu $(ARGS)

test-cluster: ## Run the tests on a real control plane (builds it once, about twenty minutes; needs Go and root; CLUSTERS=3 side by side)
	@bin=$(BIN) && "$$bin/pytest" -m "cluster and not slow" --clusters $(CLUSTERS) $(ARGS)

test-faults: ## Run the slow ones of them: faults that take their time (API server away for a minute, a silent node, ...)
	@bin=$(BIN) && "$$bin/pytest" -m "cluster and slow" --clusters $(CLUSTERS) $(ARGS)

cluster: ## Bring a Kubernetes cluster up on this machine and print the KUBECONFIG to use; Ctrl-C ends it
	@bin=$(BIN) && PYTHONPATH=tests exec "$$bin/python" -m support.cluster up $(ARGS)

check: ## Lint, types, import contracts
	@bin=$(BIN) && "$$bin/ruff" format --check . && "$$bin/ruff" check . && "$$bin/mypy" && "$$bin/lint-imports"

format: ## Rewrite the code into house format
	@bin=$(BIN) && "$$bin/ruff" format . && "$$bin/ruff" check --fix . && cp crds/*.yaml charts/trimtab/files/

bench: ## Run one benchmark: make bench NAME=schedule_cost
	@[ -f "benchmarks/$(NAME).py" ] || { echo "NAME must be one of: $$(ls benchmarks/*.py | xargs -n1 basename -s .py | tr '\n' ' ')" >&2; exit 2; }
	@bin=$(BIN) && PYTHONPATH=benchmarks:tests exec "$$bin/python" "benchmarks/$(NAME).py" $(ARGS)
