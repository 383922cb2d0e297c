# Two commands do everything on a machine with Python 3.11+, pip, make and a C++ compiler:
#   make demo    prunes two small networks on real digits, prints a table and draws pictures
#   make test    runs the tests, a process per core with one thread each
# and between them, while working:
#   make quick   runs those that are not marked slow, in about a minute on two cores
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo quick test killed coverage check sanitize bench dist docs wheel clean

demo: $(STAMP)
	$(BIN)/pareback demo

# Tests marked older are left to sanitize, which runs the same with more eyes on them, and those marked killed, which
# take minutes for a handful, to a command of their own.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not older and not killed" -n auto --dist loadfile --durations=10

killed: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m killed -n auto --dist loadfile --durations=5 tests/curves tests/lab

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

# The documentation as a site in build/site; a link that leads nowhere is an error.
docs: $(STAMP)
	$(BIN)/python -m sphinx -q -W --keep-going -c docs . build/site
	@echo "Open build/site/docs/contents.html"

# A source distribution, and one wheel for every Python and x86-64 processor, tagged manylinux where auditwheel can.
dist: $(STAMP)
	rm -rf dist build
	$(BIN)/python -m build
	if $(BIN)/python -m auditwheel repair --wheel-dir dist dist/*-linux_*.whl; then rm dist/*-linux_*.whl; fi

# That wheel in an empty environment, without a compiler: the README's example, the demo, the engine.
wheel: dist
	PYTHON=$(PYTHON) .ci/wheel

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
