# Everything happens in ./.venv; no environment has to be active. `make` alone lists the targets.
PYTHON ?= python3
# Installed before the rest, because an unpinned torch may bring gigabytes of CUDA. Others:
#   make install TORCH=torch
#   make install TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'
TORCH ?= torch==2.13.0
# More arguments for pytest: make test PYTEST_ARGS='-k tokenizer'
PYTEST_ARGS ?=
# Processes that test side by side; two of them mostly wait for Slurm. 0: none but pytest's own.
TEST_PROCESSES ?= 4
# More arguments for the fault campaigns: make torture TORTURE_ARGS='--quick --only bit_flips'
TORTURE_ARGS ?=
# More arguments for the mutants: make mutants MUTANTS_ARGS='--num 400 --seed 1 --only loader/'
MUTANTS_ARGS ?=
# Random input files of each format: make torture RANDOM_FILES=500
RANDOM_FILES ?= 5000
# More arguments for the benchmark: make bench_preprocess BENCH_ARGS=--quick
BENCH_ARGS ?=

# Tests start hundreds of processes; without byte code each would compile the packages again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
# Keyed on what was asked for; another TORCH or a newer pyproject.toml installs again.
STAMP := $(VENV)/.installed-$(shell printf '%s' '$(TORCH)' | cksum | cut -d ' ' -f 1)
SCRIPTS := $(wildcard slurm/*.sh tests/*.sh examples/*.sh) .ci/run .ci/release .ci/test_versions

.PHONY: help install demo test test_packages test_quick test_frameworks test_lowest test_newest torture mutants coverage lint docs release publish bench_preprocess bench_loader bench_limits bench_planning bench_round_trips clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z_]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' Makefile

install: $(STAMP) ## make .venv with the project (editable), all extras and the developers' tools

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "python 3.10 or newer is needed: make install PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[loader,slurm,columns]' --group dev
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: install ## text to ten training steps on this machine, in ./demo_data
	@PATH="$(CURDIR)/$(BIN):$$PATH" examples/demo.sh

test: install test_packages ## all tests; as root on Debian or Ubuntu they install and start a real Slurm
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder $(PYTEST_ARGS)

test_packages: ## install Slurm and what else tests need, as root on Debian or Ubuntu; says what is missing elsewhere
	@tests/install_packages.sh || [ $$? = 69 ]

test_quick: install ## tests that start no process and take little time (1 minute), to run while editing
	$(BIN)/python -m pytest --quick --numprocesses 2 --dist loadscope $(PYTEST_ARGS)

test_frameworks: .venv-frameworks/.installed ## tests with Lightning, DeepSpeed, TRL, Megatron, datasets and others, in .venv-frameworks
	.venv-frameworks/bin/python -m pytest --frameworks --numprocesses 2 --dist loadscope $(PYTEST_ARGS)

.venv-frameworks/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-frameworks
	.venv-frameworks/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	.venv-frameworks/bin/python -m pip install --quiet $(TORCH)
	.venv-frameworks/bin/python -m pip install --quiet $(TORCH) --editable '.[loader,slurm,columns]' --group dev --group frameworks
	@touch $@

torture: install ## each fault of disks, files and processes, one by one (2 hours; needs gcc)
	$(BIN)/python -m tests.faults $(TORTURE_ARGS)
	ulimit -v 8388608; RANDOM_FILES=$(RANDOM_FILES) $(BIN)/python -m pytest -n0 -s --timeout=0 tests/preprocess/test_input_files.py -k random_files
	$(BIN)/python -m tests.mutants --by_hand
	LAW=all ORACLE=all $(BIN)/python -m pytest -n0 tests/oracle/test_law.py tests/oracle/test_streams.py
	LFS_BREAKS=all HELPERS=all LLAMA3_LINES=all FAMILIES=all CHAT_MASKS=all LIMITED_TEXT=all $(BIN)/python -m pytest -n0 tests/lustre/test_lustre.py tests/preprocess/test_tokenizers.py tests/preprocess/test_chat.py tests/preprocess/test_conversations.py tests/preprocess/make/test_helpers.py tests/preprocess/test_runs.py tests/loader/test_boundaries.py

mutants: install ## break the code in 200 small ways, and see whether the oracle notices each (20 minutes)
	$(BIN)/python -m tests.mutants $(MUTANTS_ARGS)

coverage: install ## branches of the core that the quick tests take, by module (2 minutes)
	$(BIN)/python -m coverage run --data-file=.coverage.quick -m pytest --quick -n0 -q tests/oracle tests/loader tests/preprocess tests/format $(PYTEST_ARGS)
	$(BIN)/python -m coverage report --data-file=.coverage.quick --skip-covered

test_lowest: ## the tests with Python 3.10 and the lowest supported libraries, in .venv-lowest
	.ci/test_versions lowest

test_newest: ## the tests with the newest Python and libraries that are found, in .venv-newest
	.ci/test_versions newest

lint: install ## ruff, mypy --strict, shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@tests/install_packages.sh shellcheck || [ $$? = 69 ]
	@if command -v shellcheck >/dev/null; then \
		echo shellcheck $(SCRIPTS) && shellcheck $(SCRIPTS); \
	else \
		echo '*** SKIPPED: shellcheck is not installed, the shell scripts were not checked ***' >&2; \
	fi

docs: install ## the documentation as a site, in ./site; a broken link fails it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --config-file .site/mkdocs.yml
	@echo "look at it: python3 -m http.server --directory site"

release: install ## sdist and wheel in ./dist, checked, and tried with each Python from 3.10 on that is found (3 minutes)
	.ci/release

publish: install ## `make release`, then upload ./dist with twine; commit first, have a token (TWINE_REPOSITORY: another index)
	.ci/release --publish

bench_preprocess: install ## CPU time of the baseline, the peers and this project (15 minutes; the peers go to ./.bench)
	$(BIN)/python benchmarks/peer_environments.py
	$(BIN)/python benchmarks/preprocess_speed.py $(BENCH_ARGS)

bench_loader: install ## tokens per CPU second of the peers' loaders and this one (10 minutes; the peers go to ./.bench)
	$(BIN)/python benchmarks/peer_environments.py litdata mosaicml megatron loader_hf_datasets grain lancedb loader_tokbin energon
	$(BIN)/python benchmarks/loader_speed.py $(BENCH_ARGS)

bench_planning: install ## what a person waits for before the first document (5 minutes)
	$(BIN)/python benchmarks/planning_speed.py $(BENCH_ARGS)

bench_round_trips: install ## calls that a parallel file system answers, by command (2 minutes; needs gcc)
	$(BIN)/python benchmarks/round_trips.py $(BENCH_ARGS)

bench_limits: install ## what the loader promises in numbers, beside what it does (5 minutes)
	$(BIN)/python benchmarks/loader_limits.py $(BENCH_ARGS)

clean: ## remove .venv, caches and what the demo made
	rm -rf $(VENV) .venv-lowest .venv-newest .bench dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	if [ -e demo_data/.made_by_demo ]; then rm -rf demo_data; fi
