# Two commands do everything on a fresh machine with Python 3.11, make and a C compiler:
#   make train    set up and run the main job (2 attention + 2 expert processes on the CPU)
#   make test     set up and run the tests
# PIP_ARGS=... passes options to pip, e.g. an index with CPU builds of torch. ARGS=... passes options to the program.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
export OMP_NUM_THREADS ?= 1

.PHONY: setup train test parity kernels lint types papers clean
.DELETE_ON_ERROR:

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python %s is too old: torchmoe needs 3.11 or newer; call make PYTHON=/path/to/python3.11" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check -q $(PIP_ARGS) -c constraints.txt torch==2.13.0
	$(PY) -m pip install --disable-pip-version-check -q $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

train: $(READY)
	$(PY) -m torchmoe.titan.main $(ARGS)

test: $(READY)
	$(PY) -m pytest -n 2 --dist loadfile $(ARGS)

parity: $(READY)
	$(PY) -m torchmoe.titan.parity $(ARGS)

kernels: $(READY)
	$(PY) -m benchmarks.kernels $(ARGS)

papers: $(READY)
	$(PY) -m benchmarks.papers $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY)
	$(PY) -m mypy

clean:
	rm -rf $(VENV) build *.egg-info
