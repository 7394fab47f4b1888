# `make train` and `make test` set up what they need in .venv; the other targets are below.

# The first of some Pythons that runs and can make an environment: version managers leave names that do not.
# PYENV_VERSION matters only where pyenv has a Python without having it selected.
find_python = $(shell for python in $(1); do for run in $$python "env PYENV_VERSION=$$(echo $$python | tr -d a-z) $$python"; do \
	$$run -c 'import ensurepip, venv' >/dev/null 2>&1 && echo $$run && exit; done; done)

ifndef PYTHON
PYTHON := $(call find_python,python3.11 python3)
endif
PYTHON312 ?= $(call find_python,python3.12)
PYTHON_NEWEST ?= $(call find_python,python3.13 python3.12)
VENV := .venv
VENV_OLDEST := .venv-oldest
VENV_NEWEST := .venv-newest
VENV_RELEASE := .venv-release
VENV_DEVICE := .venv-device
VENV_GPU := .venv-gpu
VENV_DOCS := .venv-docs
PYTEST_FLAGS := -n 2 --dist worksteal -q
LIBRARY_TESTS := -m "not slow" --ignore tests/examples --ignore tests/benchmarks
OLDEST_TESTS := -m "not slow" --quick-compilation tests/linalg tests/optax_suite tests/optimizers tests/params \
	tests/sharding tests/state tests/transforms tests/test_documents.py tests/test_flax.py

.PHONY: train test test-all test-versions test-oldest test-newest mutants lint docs docs-serve release-check device-program on-device frameworks

train: $(VENV)/installed
	$(VENV)/bin/python -m examples.gpt2.train

test: lint
	$(VENV)/bin/python -m pytest $(PYTEST_FLAGS) -m "not slow" --quick-compilation

test-all: lint
	$(VENV)/bin/python -m pytest $(PYTEST_FLAGS)

# Breaks the code on purpose: names the changes that no test finds. --count 100 draws as many more.
mutants: $(VENV)/installed
	$(VENV)/bin/python -m tools.mutants

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

# The library's own tests with the oldest versions that pyproject.toml allows, and with the newest that pip finds.
test-versions: test-oldest test-newest

test-oldest: $(VENV_OLDEST)/installed
	$(VENV_OLDEST)/bin/python -m pytest $(PYTEST_FLAGS) $(OLDEST_TESTS)

# Compiled as users compile.
test-newest:
	@if test -x $(VENV_NEWEST)/bin/python || test -n "$(PYTHON_NEWEST)"; then \
		$(MAKE) $(VENV_NEWEST)/installed && \
		$(VENV_NEWEST)/bin/python -m pytest $(PYTEST_FLAGS) $(LIBRARY_TESTS); \
	else \
		echo "skipped: no Python 3.12 or 3.13 here, so the library was not tested on its newest JAX"; \
	fi

# Builds the sdist and the wheel into dist/, and tries both as users would.
release-check: $(VENV_RELEASE)/installed
	$(VENV_RELEASE)/bin/python -m tests.release_check

# What a step becomes on an H100 and on TPUs: compiled by what JAX has for them, without a device.
device-program: $(VENV_DEVICE)/installed
	for device in h100 v5e v6e; do \
		JAX_PLATFORMS=cpu $(VENV_DEVICE)/bin/python -m benchmarks.device_program --device $$device || exit 1; \
	done
	JAX_PLATFORMS=cpu $(VENV_DEVICE)/bin/python -m pytest -q tests/benchmarks/test_device_program.py

# All figures of the GPU of this machine, in ten minutes after the installation.
on-device: $(VENV_GPU)/installed
	$(VENV_GPU)/bin/python -m benchmarks.on_device

# A tiny training inside of each framework, in its own environment: half an hour, 7 GB. FRAMEWORKS names some of them.
frameworks: $(VENV)/installed
	@if test -n "$(PYTHON312)"; then \
		$(PYTHON312) -m examples.frameworks $(FRAMEWORKS) && \
		$(VENV)/bin/python -m benchmarks.report && \
		sed -n '/<!-- frameworks -->/,/<!-- end of frameworks -->/p' docs/frameworks.md; \
	else \
		echo "skipped: no Python 3.12 here, so no framework was tried"; \
	fi

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q --no-compile -e '.[test,dev]'
	$(VENV)/bin/python -m compileall -q -j 0 $(VENV)/lib  # on all cores; pip has one
	touch $@

$(VENV_NEWEST)/installed: pyproject.toml
	$(PYTHON_NEWEST) -m venv $(VENV_NEWEST)
	$(VENV_NEWEST)/bin/pip install -q --no-compile -e '.[test-library]'
	$(VENV_NEWEST)/bin/python -m compileall -q -j 0 $(VENV_NEWEST)/lib
	touch $@

$(VENV_OLDEST)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV_OLDEST)
	grep -oE '"(jax|optax|flax)>=[^"]+"' pyproject.toml | tr -d '"' | sed 's/>=/==/' > $(VENV_OLDEST)/pins
	$(VENV_OLDEST)/bin/pip install -q --no-compile -e '.[test-library]' -r $(VENV_OLDEST)/pins
	$(VENV_OLDEST)/bin/python -m compileall -q -j 0 $(VENV_OLDEST)/lib
	touch $@

$(VENV_RELEASE)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV_RELEASE)
	$(VENV_RELEASE)/bin/pip install -q -e '.[release]'
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
