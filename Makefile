# The only commands to know. Each sets up what it needs in .venv.
.PHONY: demo test check bench clean
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

demo: .venv/ready
	$(BIN)/adanpc demo

test: check
	$(BIN)/pytest -n auto --dist worksteal --cov --cov-report=term
	$(BIN)/coverage report --include='src/adanpc/core/*,src/adanpc/index/*,src/adanpc/store/*' --fail-under=100

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/ready
	$(INSTALL) --editable '.[bench]'
	$(BIN)/python -m benchmarks.core

# torch comes first and pinned, so that nothing pulls another build of it.
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		(echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" && false)
	$(PYTHON) -m venv .venv
	$(INSTALL) torch
	$(INSTALL) --editable '.[fast,vision,dev]'
	touch $@

clean:
	rm -rf .venv build dist .coverage .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
