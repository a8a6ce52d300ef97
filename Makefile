# make demo    the main job: a 3D U-Net on a brain scan, plain and in half its memory
# make test    linters, types and the whole test suite
# make sanitize  tests of the compiled recorder under AddressSanitizer and UBSan (gcc, Linux)
# make docs    the documentation as a site, in site/
# make format  let ruff rewrite what the linters object to
# make clean   remove the environment and caches
#
# Variables: PYTHON (3.11 or later), VENV, WORKERS (processes that run tests), TORCH_INDEX (a package
# index with CPU builds of torch, where the default one has only larger builds), ARGS (for pytest or
# the demo: make test ARGS="tests/test_measure.py", make demo ARGS="--steps 10"), ENGINES (which
# recorders the tests run on: "python compiled", each where it can be had), TORCH (another version of
# torch than the pinned one, in an environment of its own: make test TORCH=2.10.0).

PYTHON ?= python3
TORCH ?=
VENV ?= .venv$(TORCH:%=-%)
WORKERS ?= 2
TORCH_INDEX ?=
ARGS ?=
ENGINES ?= python compiled

BIN := $(VENV)/bin
PINS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
# Most of the 17,000 modules that come with torch and the others are never imported: each is compiled
# when it first is. Containers often forbid Python to write that down; then each of the processes
# that tests start would compile thousands again.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE
# The compiled recorder is kept inside the environment.
export LOWTIDE_CACHE := $(abspath $(VENV))/lowtide
# One thread a process: WORKERS processes share the cores, and sums keep one order. Nor does Inductor
# start a pool of compilers for each: WORKERS compile beside each other as it is.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1

.PHONY: help demo test lint core sanitize docs format clean
.DELETE_ON_ERROR:

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.demo
	$(BIN)/python examples/segment_brain.py $(ARGS)

# The compiled recorder is built while the linters run: each keeps one core busy for a minute.
# Work is stolen by halves: tests of a file stay together, so that what they share is made once.
test: $(VENV)/.dev
	@$(MAKE) --no-print-directory -j 2 -O lint $(if $(filter compiled,$(ENGINES)),core)
	@for engine in $(ENGINES); do \
	    if [ $$engine = compiled ]; then \
	        $(BIN)/python -m lowtide.compiled >/dev/null; \
	        case $$? in 0) ;; 2) echo "no compiled recorder here: not tested"; continue;; *) exit 1; esac; \
	    fi; \
	    echo "Tests on the engine: $$engine"; \
	    LOWTIDE_ENGINE=$$engine $(ONE_THREAD) \
	        $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS) || exit 1; \
	done

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(if $(TORCH),,$(BIN)/mypy)

# Where it cannot be built, `test` says so.
core: $(VENV)/.dev
	@$(BIN)/python -m lowtide.compiled >/dev/null 2>&1 || true

# Built beside the usual core, whose place depends on CXX. Nothing is captured: what a sanitizer says
# before it ends the process would be lost.
SANITIZED := CXX="g++ -fsanitize=address,undefined -fno-omit-frame-pointer -g1"
SANITIZERS = $(foreach lib,asan stdc++,$(shell g++ -print-file-name=lib$(lib).so))
sanitize: $(VENV)/.dev
	$(SANITIZED) $(BIN)/python -m lowtide.compiled
	$(SANITIZED) LD_PRELOAD="$(SANITIZERS)" PYTHONMALLOC=malloc \
	    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	    LOWTIDE_ENGINE=compiled $(ONE_THREAD) $(BIN)/python -m pytest -q --capture=no \
	    $(or $(ARGS),tests/test_core_lifetimes.py tests/test_engine.py tests/test_direct.py \
	        $(wildcard tests/test_rules_*.py))

docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch goes in alone and first: nothing that is installed later can then bring another build.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "lowtide needs Python 3.11 or later; '$(PYTHON)' is $$($(PYTHON) -V 2>&1 || true)." >&2; \
	    echo "Name another one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt >$(PINS))
	@echo "Installing torch into $(VENV) (some minutes)"
	$(INSTALL) -c $(PINS) --upgrade pip
	$(INSTALL) -c $(PINS) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "Installing lowtide and what the demo needs"
	$(INSTALL) -c $(PINS) -e ".[demo]"
	@echo "Building the compiled recorder"
	@$(BIN)/python -m lowtide.compiled >/dev/null || echo "going on without it"
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@echo "Installing lowtide and what the tests need"
	$(INSTALL) -c $(PINS) -e ".[demo]" --group dev
	$(INSTALL) -c $(PINS) --no-deps --group no-deps
	touch $@ $(VENV)/.demo
