# `make train` and `make test` set up what they need in .venv; the other targets are below.

# The first of some Pythons that runs and can make an environment: version managers leave names that do not.
find_python = $(shell for python in $(1); do \
	$$python -c 'import ensurepip, venv' >/dev/null 2>&1 && echo $$python && break; done)

ifndef PYTHON
PYTHON := $(call find_python,python3.11 python3)
endif
VENV := .venv
VENV312 := .venv312
VENV_DEVICE := .venv-device
VENV_GPU := .venv-gpu
VENV_DOCS := .venv-docs
PYTEST_FLAGS := -n 2 --dist worksteal -q

.PHONY: train test test-all test-312 mutants lint docs docs-serve device-program on-device

train: $(VENV)/installed
	$(VENV)/bin/python -m examples.gpt2.train

test: lint
	$(VENV)/bin/python -m pytest $(PYTEST_FLAGS) -m "not slow" --quick-compilation

test-all: lint
	$(VENV)/bin/python -m pytest $(PYTEST_FLAGS)

# Breaks the code on purpose: names the changes that no test finds. --count 100 draws as many more.
mutants: $(VENV)/installed
	$(VENV)/bin/python -m tests.mutants

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m tools.prose

# The pages of docs/ as a site, in the folder site; docs-serve shows it at http://127.0.0.1:8000.
docs: $(VENV_DOCS)/installed
	$(VENV_DOCS)/bin/mkdocs build --strict

docs-serve: $(VENV_DOCS)/installed
	$(VENV_DOCS)/bin/mkdocs serve

# The library's own tests on Python 3.12, where pip finds a newer JAX, compiled as users compile.
test-312:
	@if test -x $(VENV312)/bin/python || $(PYTHON312) -c 'import ensurepip, venv' 2>/dev/null; then \
		$(MAKE) $(VENV312)/installed && $(VENV312)/bin/python -m pytest $(PYTEST_FLAGS) \
			-m "not slow" --ignore tests/examples; \
	else \
		echo "skipped: no Python 3.12 here, so the library was not tested on its newer JAX"; \
	fi

# What a step becomes on an H100: compiled by CUDA's plugin of JAX, for which no GPU need be there.
device-program: $(VENV_DEVICE)/installed
	JAX_PLATFORMS=cpu $(VENV_DEVICE)/bin/python -m benchmarks.device_program
	JAX_PLATFORMS=cpu $(VENV_DEVICE)/bin/python -m pytest -q tests/benchmarks/test_device_program.py

# All figures of the GPU of this machine, in ten minutes after the installation.
on-device: $(VENV_GPU)/installed
	$(VENV_GPU)/bin/python -m benchmarks.on_device

# PYENV_VERSION matters only where pyenv has Python 3.12 without having it selected.
PYTHON312 ?= env PYENV_VERSION=3.12 python3.12

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q --no-compile -e '.[test,dev]'
	$(VENV)/bin/python -m compileall -q -j 0 $(VENV)/lib  # on all cores; pip has one
	touch $@

$(VENV312)/installed: pyproject.toml
	$(PYTHON312) -m venv $(VENV312)
	$(VENV312)/bin/pip install -q --no-compile -e '.[test-library]'
	$(VENV312)/bin/python -m compileall -q -j 0 $(VENV312)/lib  # on all cores; pip has one
	touch $@

$(VENV_GPU)/installed: pyproject.toml
	$(PYTHON312) -m venv $(VENV_GPU)
	$(VENV_GPU)/bin/pip install -q --no-compile -e '.[test]' 'jax[cuda12]'
	touch $@

$(VENV_DEVICE)/installed: pyproject.toml
	$(PYTHON312) -m venv $(VENV_DEVICE)
	$(VENV_DEVICE)/bin/pip install -q --no-compile -e '.[test,device-program]'
	touch $@

$(VENV_DOCS)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV_DOCS)
	$(VENV_DOCS)/bin/pip install -q --no-compile -e '.[docs]'
	touch $@
