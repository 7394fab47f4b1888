# Two commands: `make train` and `make test`. Both set up what they need in .venv.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
INSTALLED := $(VENV)/installed
# A second Python with a newer JAX: the library's own tests run there too. Empty where there is none.
PYTHON312 ?= $(shell for python in "python3.12" "env PYENV_VERSION=3.12.1 python3.12"; do \
	$$python -c '' 2>/dev/null && echo $$python && break; done)
VENV312 := .venv312
PYTEST := python -m pytest -n 2 --dist worksteal -q

.PHONY: train test test-all test-312 lint

train: $(INSTALLED)
	$(VENV)/bin/python -m examples.gpt2.train

test: lint
	$(VENV)/bin/$(PYTEST) -m "not slow"

test-all: lint
	$(VENV)/bin/$(PYTEST)

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

ifeq ($(strip $(PYTHON312)),)
test-312:
	@echo "skipped: there is no Python 3.12 here, so the library was not tested on its JAX"
else
test-312: $(VENV312)/installed
	$(VENV312)/bin/$(PYTEST) -m "not slow" --ignore tests/examples

$(VENV312)/installed: pyproject.toml
	$(PYTHON312) -m venv $(VENV312)
	$(VENV312)/bin/pip install -q -e . pytest pytest-xdist chex hypothesis
	touch $@
endif

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q -e '.[test,dev]'
	touch $@
