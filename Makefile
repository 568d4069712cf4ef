# Needs Python 3.11+ with venv, and make; the rest goes into .venv.
#
#   make demo    a shop on gunicorn, and a client that retries, collides and kills workers
#   make test    ruff, mypy and the whole suite
#   make quick   while you work: ruff, mypy, and the tests that take no seconds, on fakeredis and Valkey, in a minute
#   make serve   the shop to try in a browser, with a switch for each trouble, or with curl; Ctrl-C ends it
#   make soak    random faults under load, five minutes of it (or MINUTES=60), and a table of what happened
#   make bench   what a call, a row and a request cost, in build/bench.json; about five minutes

PYTHON ?= python3
MINUTES ?= 5
# More than a small machine has cores: half of the time, a test waits for a server, a lease or a process.
WORKERS ?= 6
BIN := .venv/bin
READY := .venv/.ready

# The suite starts some hundreds of Python processes. They share compiled modules, also where the shell says otherwise.
unexport PYTHONDONTWRITEBYTECODE

LINT := $(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/mypy

.PHONY: demo test quick serve soak bench clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(LINT)
	$(BIN)/pytest -n $(WORKERS)

quick: $(READY)
	$(LINT)
	$(BIN)/pytest -n 3 -m "not slow"

serve: $(READY)
	@$(BIN)/python examples/serve.py

bench: $(READY)
	$(BIN)/python -m tests.bench

soak: $(READY)
	$(BIN)/python -m tests.faults.soak --minutes $(MINUTES)

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("$(PYTHON) is Python %d.%d; make PYTHON=python3.11 (or newer)" % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --group dev --editable .
	@touch $@
