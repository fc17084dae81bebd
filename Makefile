# Every target sets up what it needs in .venv, on a machine that has Python 3.11 or 3.12, pip, make and git: serving and
# chatting what they import, the simulator and the demo also matplotlib, the others everything a developer uses.
# `make PYTHON=/path/to/python check` picks the interpreter; `make clean` first if .venv exists already.

PYTHON ?=
ARGS ?=
# How long a soak takes
MINUTES ?= 60

VENV := .venv
BIN := $(VENV)/bin
# What .venv holds: to serve a model, to draw too, to develop too.
SERVE := $(VENV)/.serve
DRAW := $(VENV)/.draw
STAMP := $(VENV)/.installed
# One thread each: the tests themselves run side by side. What they compile is written, also where the environment says
# otherwise: every worker and server would compile it again.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q
# Tests of a file share its servers, so they stay on one worker (tests/conftest.py). Many wait for a server most of their
# time: three workers for two processors.
SPREAD := -n $$((3 * $$(nproc) / 2)) --dist loadgroup --no-loadscope-reorder
# On a machine shared with others a server may answer later than a test waits. In continuous integration a test that fails
# runs once more, alone, and has to pass then; the first failure stays in the output, to be mended. A run that broke off
# (pytest's other exit codes) fails at once.
ONCE_MORE := $(if $(CI),|| { [ $$? = 1 ] && $(MAKE) --no-print-directory again; })
CODE := src tests tools $(wildcard benchmarks)
# Examples are read as they are: no types where a reader needs none.
STYLED := $(CODE) examples

.DEFAULT_GOAL := help
.PHONY: help serve chat demo test campaign again kernels check sim soak options docs clean lint pure steps

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: $(SERVE) ## Serve a model over HTTP: make serve ARGS="--port 9000"
	@$(BIN)/paceline serve $(ARGS)

check: $(STAMP) ## Run the quick gate: format, lint, types, import contracts, sizes, pure tests
	@$(MAKE) --no-print-directory -j 2 lint pure

test: $(STAMP) ## Run the tests of every feature, 100,000 simulated steps and a mutant of each family
	@$(MAKE) --no-print-directory -j 2 lint steps
	@HYPOTHESIS_PROFILE=quick $(PYTEST) tests -m "not campaign" $(SPREAD) $(ONCE_MORE)

# Simulated with other seeds than the first 100,000 of `make test`.
STEPS ?= 1000000
campaign: $(STAMP) ## Run the long tests: a million steps, all mutants, documented commands, browser, soak
	@$(PYTEST) tests -m "campaign or hypothesis" $(SPREAD) $(ONCE_MORE)
	@$(BIN)/python -m tests.dst --seeds 112:312 --min-steps $(STEPS) --require $$(($(STEPS) / 1000)) --jobs 2

again: $(STAMP) ## Run the tests that failed last, one after the other
	@$(PYTEST) tests --last-failed --last-failed-no-failures none

# Not in .venv: where torch brings a Triton for the GPU, that one is used.
TRITON := build/triton-3.7.1
INTERPRETED := $(wildcard tests/torch/test_*interpreted*.py)

kernels: $(TRITON) ## Check the GPU kernels on a machine without one, through Triton's interpreter
	@PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 PACELINE_REQUIRE_TRITON=1 $(PYTEST) $(INTERPRETED) -n auto --dist worksteal

$(TRITON): $(STAMP)
	@$(PIP) -q --no-deps --target $@.part triton==$(@:build/triton-%=%) && mv $@.part $@ && touch $@

chat: $(SERVE) ## Talk to a model: make chat ARGS="--model ./my-model"
	@$(BIN)/paceline chat $(ARGS)

demo: $(DRAW) ## Compare batching modes on this machine, with a picture: make demo ARGS="--rows 4"
	@$(BIN)/paceline demo $(or $(ARGS),--quick)

sim: $(DRAW) ## Run the simulator: make sim ARGS="--help"
	@$(BIN)/paceline sim $(ARGS)

options: $(STAMP) ## Write again what is made from code and results: reference pages, figures, dashboards
	@$(BIN)/python -m tools.option_pages
	@$(BIN)/python -m tools.api_pages
	@$(BIN)/python -m tools.metric_pages
	@$(BIN)/python -m tools.figure_tables
	@$(BIN)/python -m tools.dashboards

docs: $(STAMP) ## Build the documentation as a site into build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/site/index.html"

soak: $(STAMP) ## Send mixed traffic to a server for an hour: make soak MINUTES=10
	@$(BIN)/python -m tests.soak --minutes $(MINUTES) $(ARGS)

# Parts of the gates above: what `check` and `test` run side by side.
pure: $(STAMP)
	@HYPOTHESIS_PROFILE=quick $(PYTEST) tests/pure -m "not slow and not campaign" -n auto

steps: $(STAMP)
	@$(BIN)/python -m tests.dst --seeds 0:112 --min-steps 100000 --require 100 --jobs 2

# Results under out/ are the user's and stay.
clean: ## Remove .venv, caches and build output
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	@find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

lint: $(STAMP)
	@$(BIN)/python -m ruff format --check --quiet $(STYLED) || \
		{ echo "Not formatted; to fix: $(BIN)/ruff format $(STYLED)" >&2; exit 1; }
	@$(BIN)/python -m ruff check --quiet $(STYLED)
	@$(BIN)/python -m mypy --no-error-summary $(CODE)
	@report=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$report" >&2; exit 1; }
	@$(BIN)/python tools/check_sizes.py

# A stamp is newer than its inputs exactly when .venv holds what they ask for. Candidates are run, not only looked up: a
# name on the path may be a shim for a version that is not there. Some distributions ship venv without the bundled pip;
# then the interpreter's own pip fills the environment.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
READY := $(VENV)/.created

$(READY):
	@set -e; \
	if ! { $(BIN)/python -c '$(SUPPORTED)' && $(BIN)/python -m pip --version; } >/dev/null 2>&1; then \
		python=; \
		for candidate in $(or $(PYTHON),python3.11 python3.12 python3); do \
			if "$$candidate" -c '$(SUPPORTED)' >/dev/null 2>&1; then python=$$candidate; break; fi; \
		done; \
		if [ -z "$$python" ]; then \
			echo "No Python 3.11 or 3.12 found$(if $(PYTHON), at $(PYTHON)); install one (with venv and pip)" \
				"or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
			exit 1; \
		fi; \
		echo "Creating $(VENV) with $$python" >&2; \
		"$$python" -m venv --clear $(VENV) >/dev/null 2>&1 || { \
			"$$python" -m venv --clear --without-pip $(VENV); \
			"$$python" -m pip --python $(BIN)/python -qq install pip; \
		}; \
	fi; \
	touch $@

# Variables instead of -c, so that the build backend is a pinned version too; pip 25.3 and later read the second one.
# Nothing is compiled here: a module is compiled when it is first imported, and most of torch never is.
PIP := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	$(BIN)/python -m pip --disable-pip-version-check install --no-compile
# A GPU of this machine, seen from Linux or from WSL: it needs torch.
GPU := $(wildcard /dev/nvidiactl /dev/dxg)
comma := ,
# $(call install,WHAT,FOR): pip's own output on a terminal, where its bars tell how far a download is. What steps on a
# CPU run is compiled at once, so that no start has to.
define install
	@echo "Installing what $(2) needs into $(VENV), once" >&2
	@[ -t 1 ] || quiet=-qq; $(PIP) $$quiet -e '$(1)'
	@$(BIN)/paceline warm || true
	@touch $@
endef

$(SERVE): pyproject.toml constraints.txt | $(READY)
	$(call install,.$(if $(GPU),[gpu]),serving)

$(DRAW): pyproject.toml constraints.txt | $(READY)
	$(call install,.[plot$(if $(GPU),$(comma)gpu)],the simulator with its pictures)
	@touch $(SERVE)

# Hundreds of processes are started by the tests: compile everything once, on all cores, also where the environment
# forbids to write what an import compiles. Files that are templates do not compile, which is no error.
$(STAMP): pyproject.toml constraints.txt | $(READY)
	@[ -n "$(GPU)" ] || $(BIN)/python -m pip config list | grep -E 'find-links|index-url' >/dev/null || \
		echo "This machine shows no NVIDIA GPU. The default torch brings CUDA libraries, 5.6 GB of download and disk;" \
			"to install its CPU build instead, stop here and see 'Set up' in CONTRIBUTING.md" >&2
	$(call install,.[dev],development)
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $(SERVE) $(DRAW)
