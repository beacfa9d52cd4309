# Everything runs in .venv, which is made from Python 3.11 and redone only when pyproject.toml changes.
# Another interpreter: make test PYTHON=/path/to/python3.11

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := $(wildcard delayd realtime meta cli spark bench examples tests pyspark_delayd.py)

# The tests start hundreds of processes: without files of bytecode each of them compiles every module anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-parallel test-apart long pythons kernel asan bench lint clean

help:
	@echo "make demo    schedule 20,000 messages, kill the delay server in the middle, show that none is lost"
	@echo "make test    all tests"
	@echo "make long    the simulation with 1,500 seeds; minutes"
	@echo "make pythons unit, property and crash tests on each Python of this machine that delayd is for"
	@echo "make kernel  build the compiled pieces into $(VENV): the same bytes for less processor time"
	@echo "make asan    run the tests of the compiled pieces under sanitizers"
	@echo "make bench   measure, with Redis beside it; five minutes, one JSON line a result"
	@echo "make lint    ruff, mypy and the import contracts"
	@echo "make clean   remove what builds and tools left; the environment in $(VENV) stays"

demo: $(STAMP)
	$(BIN)/python -m examples.demo

# Three workers on two cores, because many tests wait for timers and processes. Beside them run, by two, the tests that
# wait for one large process: Spark's JVM, or the build of a package. Tests that need a core of their own come last,
# two at a time.
test: $(STAMP)
	$(MAKE) --jobs 2 --output-sync=target test-parallel test-apart
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "serial and not long"

test-parallel: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not serial and not spark and not packaging and not long"

test-apart: $(STAMP)
	$(BIN)/python -m pytest -p no:cacheprovider -n 2 --dist loadfile -m "spark or packaging"

# What `make test` has in a bounded form.
long: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m long
	$(BIN)/python -m tests.simulation --seeds 1500 --jobs 2

pythons:
	.ci/pythons

# Tests compare both forms of each piece, and build the compiled one for themselves.
kernel: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check ./kernel

# Python itself is built without them, so they are put before it, and its own allocator is left out.
asan: $(STAMP)
	CFLAGS="-g -fsanitize=address,undefined -fno-sanitize-recover=undefined" PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
		$(BIN)/python -m pytest -p no:cacheprovider tests/unit/test_kernel.py tests/unit/test_lane.py tests/unit/log/test_log_write.py

bench: $(STAMP)
	$(BIN)/python -m bench

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy $(SOURCES)
	$(BIN)/lint-imports --no-logo

clean:
	rm -rf .venv-* build kernel/build kernel/*.egg-info dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache spark-warehouse
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "delayd needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[spark,dev]'
	touch $@
