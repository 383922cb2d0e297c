# Two commands do everything on a machine with Python 3.11+, pip, make and a C++ compiler:
#   make demo    prunes two small networks on real digits, prints a table and draws pictures
#   make test    runs the tests, a process per core with one thread each
# and between them, while working:
#   make quick   runs those that are not marked slow, in under a minute on two cores
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test quick coverage check sanitize bench clean

demo: $(STAMP)
	$(BIN)/pareback demo

# Tests marked older are left to sanitize, which runs the same with more eyes on them.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not older" -n auto --dist loadfile --durations=10

# What takes a second or more with all its cases is marked slow and left to test. The slowest are named at the end: a
# new one that stands out there wants the mark.
quick: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not older" -n auto --dist loadfile --durations=5

# The same as test with every line watched, which takes half as long again; less than 95 % is a failure.
coverage: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not older" -n auto --dist loadfile --cov --cov-report=term:skip-covered

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

sanitize: $(STAMP)
	PYTHON=$(BIN)/python .ci/sanitize

bench: $(STAMP)
	$(BIN)/python benchmarks/overhead.py training

# The stamp is newer than pyproject.toml only after a complete install.
$(STAMP): pyproject.toml
	@echo "Installing PyTorch and the rest into .venv: several GB, some minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .coverage*
