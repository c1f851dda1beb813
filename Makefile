# One way in. `make help` lists the targets; every target sets up what it needs.
SHELL := /bin/bash
# 3.11, or else 3.12 or 3.13.
PYTHON ?= $(or $(firstword $(shell command -v python3.11 python3.12 python3.13)),python3.11)
export PYTHON
# The torch to run with: 2.13, or another stack of serving/pins.py, in an environment of its own: make test STACK=2.14
STACK ?= 2.13
VENV := .venv$(if $(filter-out 2.13,$(STACK)),-$(STACK))
BIN := $(VENV)/bin
# What an environment has already: enough for the demo, and for development.
DEMO := $(VENV)/.demo
STAMP := $(VENV)/.development
# Two processes for each core: half of them wait for a server. A file's tests stay together: they share what it sets up.
PYTEST := $(BIN)/python -m pytest --numprocesses $(shell echo $$(( 2 * $$(nproc) ))) --dist loadfile --no-loadscope-reorder

# One thread per process: a TBE call on CPU runs on one, and the machine is shared.
export OMP_NUM_THREADS ?= 1
# What takes minutes says how far it is, into a file too.
export PYTHONUNBUFFERED := 1
# uv installs no bytecode: the first import of a package writes it.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-fresh demo-hosts quick test test-all test-stack lint docs settings mutants promises fuzz faults kube soak bench bench-quick audit sbom dist pins clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(STAMP) ## Make .venv with all pinned packages (every other target first installs what it needs)

$(DEMO): $(patsubst %,requirements/%.txt,serve triton export demo torch-cpu torch-pypi uv) $(wildcard requirements/stack-$(STACK).txt) pyproject.toml $(patsubst %,requirements/%.sh,setup install torch uv)
	@requirements/setup.sh $(VENV) $(STACK)
	@touch $@

$(STAMP): $(DEMO) requirements/dev.txt
	@UV_COMPILE_BYTECODE=1 requirements/install.sh $(VENV) dev.txt uv.txt
	@touch $@

demo: $(DEMO) ## Train on MovieLens, export, serve, look up, and show what happened
	@$(BIN)/python -m examples.movielens.demo

demo-fresh: $(DEMO) ## Train on MovieLens in order of time while it is served: AUC of stale and of fresh rows
	@$(BIN)/python -m examples.movielens.fresh

demo-hosts: $(DEMO) ## DLRM-v2's tables on four hosts: one killed, a version rolled out (as root in network namespaces)
	@$(BIN)/python -m examples.hosts.demo

quick: $(STAMP) ## The tests that need neither torch nor a server: within a minute
	@$(PYTEST) -p tests.support.quick -r fE

test: lint ## ruff, mypy --strict, and every promise once, end to end: ten minutes on two quiet cores
	@requirements/test-tools.sh
	@$(PYTEST)

test-all: test ## Everything: then also what goes on for long or waits for real time-outs, many random examples, torch 2.14
	@requirements/test-tools.sh clients
	@$(PYTEST) -m "(long or hypothesis) and not kube" --hypothesis-profile long
	@$(MAKE) --no-print-directory test-stack STACK=2.14

# From training to a server and a router: what calls torch, torchrec and FBGEMM in ways of its own. Calls to hosts that
# fail, and the messages of a router, do not.
test-stack: $(STAMP) ## The tests that a release of torch may break, with STACK=2.14
	@$(PYTEST) tests/export/parity tests/export/plan tests/export/rows tests/export/scores \
	  tests/export/trained tests/serving/lookup tests/serving/router/test_routed_scores.py \
	  tests/serving/router/test_router_ranks.py tests/serving/test_engine.py \
	  tests/serving/test_output_dtypes.py tests/serving/test_pins.py tests/serving/test_sequences.py \
	  tests/serving/test_sequences_served.py tests/serving/test_torch_libraries.py

lint: $(STAMP) ## ruff and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: $(STAMP) ## Build the website of the documentation into build/site
	@$(BIN)/python -m docs.site

mutants: $(STAMP) ## Change checked code, and list the changes that no test notices (hours; PART=export-rows, MUTANTS='export.rows.table_error*')
	@requirements/mutants.sh "$(PART)" $(MUTANTS)

settings: $(STAMP) ## Write the tables of docs/settings.md from the code
	@$(BIN)/python -m docs.site.settings

promises: $(STAMP) ## Write the tests of each promise into docs/reliability.md and docs/security.md
	@$(BIN)/python -m tests.docs.promises

fuzz: $(STAMP) ## A hundred thousand malformed and hostile requests to a real server; ends in one line of figures
	@$(BIN)/python -m tests.fuzz

faults: $(STAMP) ## Kill, cut, fill and cancel, again and again; ends in one line of figures
	@$(BIN)/python -m tests.faults

kube: $(STAMP) ## Run a fleet as Kubernetes would, in podman's pods and networks of their own (root; minutes, more the first time)
	@requirements/kube.sh
	@unshare --net $(BIN)/python -m pytest -m kube tests/kube

soak: $(STAMP) ## Half an hour each of lookups and scores at 80 % of capacity, then three times the capacity; ends in one line of figures
	@$(BIN)/python -m tests.soak

bench: $(STAMP) ## Measure, beside limits and other servers, in one run; writes benchmarks/results and docs/benchmarks.md
	@requirements/bench.sh
	@$(BIN)/python -m benchmarks

bench-quick: $(STAMP) ## The same in five minutes: fewer workloads, nothing written
	@requirements/bench.sh
	@$(BIN)/python -m benchmarks --quick

audit: ## Known vulnerabilities of the pinned packages; asks PyPI
	@requirements/audit.sh

sbom: ## What each image has of Python packages, as CycloneDX, in build/sbom
	@requirements/sbom.sh

dist: ## Build the sdist and the wheel in build/dist, and check them with twine
	@requirements/dist.sh

pins: ## Resolve requirements/*.in anew into requirements/*.txt
	@requirements/pin.sh

clean: ## Remove the environment and everything built
	@rm -rf .venv .venv-* .bench build mutants *.egg-info
