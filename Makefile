# make serve   install what serving needs, then serve the demo fleet     ARGS="fleet.yaml --port 9000"
# make test    set up, then run the tests                                ARGS="tests/kv -x"
# make check   what CI checks besides the tests
# make bench   the benchmarks, on a quiet machine
# make evidence   the figures of docs/reproduction.md, made anew        ARGS="llumnix --figure 3"
# make gpu-check   what CI cannot: the tests and figures that need a GPU
# make prometheus   a real Prometheus for the tests of deploy/, out of Debian's package
# make chromium   Debian's Chromium, for the tests of the page
# make clients   the clients of tests/clients, in an environment of their own
# make setup   all that tests and tools need, too                        PYTHON=python3.12

SHELL = /bin/sh
PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
SERVES := $(VENV)/.serves
INSTALLED := $(VENV)/.installed
WARM := $(VENV)/.warm

PYTHON_FITS := import sys; sys.exit(sys.version_info < (3, 11))
TORCH_FITS := import sys, torch; torch.ones(2).sum(); \
  sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))
HAS_WARM := import sys, importlib.util as i; sys.exit(i.find_spec("kvloom.kernels.cpu.warm") is None)

.PHONY: setup ready serve test check bench evidence gpu-check prometheus chromium clients clean
.DELETE_ON_ERROR:

setup: $(INSTALLED) ready

# Each process of a fleet would compile what it imports if nobody had kept the bytecode.
ready: $(WARM)
	@$(BIN)/python -m compileall -q src/kvloom

serve: ready
	@exec $(BIN)/kvloom serve $(ARGS)

test: setup
	@exec env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 \
	  --dist worksteal $(ARGS)

check: setup
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -c 'from importlinter.cli import lint_imports_command as lint; lint()' --no-cache

bench: setup
	@exec $(BIN)/python -m benchmarks $(ARGS)

evidence: setup
	@exec $(BIN)/python -m tools.evidence $(ARGS)

gpu-check: setup
	@exec $(BIN)/python -m tools.gpu_check $(ARGS)

prometheus: $(BIN)/prometheus

# It needs some fifty other packages, so that it is installed, and not unpacked.
chromium:
	@command -v chromium >/dev/null || { echo "== installing Chromium"; \
	  install='apt-get install -qq -y --no-install-recommends chromium'; export DEBIAN_FRONTEND=noninteractive; \
	  $$install || { apt-get update -qq && $$install; }; }

clients: build/clients/.installed

build/clients/.installed: tests/clients/requirements.txt
	$(PYTHON) -m venv build/clients
	build/clients/bin/python -m pip install -q --disable-pip-version-check -r $<
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A venv that sees the system's packages where the system's torch will do. Systems without ensurepip
# (Debian without python3-venv) get their pip from outside.
$(BIN)/pip:
	@$(PYTHON) -c '$(PYTHON_FITS)' || { echo "kvloom needs Python 3.11 or newer; name one: make PYTHON=python3.12" >&2; exit 1; }
	@site=; if $(PYTHON) -c '$(TORCH_FITS)' 2>/dev/null; then site=--system-site-packages; fi; \
	echo "== making $(VENV) with $$($(PYTHON) --version) $$site"; \
	$(PYTHON) -m venv $$site $(VENV) >/dev/null 2>&1 || { \
	  $(PYTHON) -m venv --clear --without-pip $$site $(VENV) && \
	  $(PYTHON) -m pip -qq --python $(BIN)/python install --ignore-installed pip; }

$(SERVES): pyproject.toml | $(BIN)/pip
	@if $(BIN)/python -c '$(TORCH_FITS)' 2>/dev/null; \
	then echo "== torch is here already"; \
	else echo "== installing $(TORCH), the largest part"; $(PIP) install '$(TORCH)'; fi
	@echo "== installing kvloom and what it needs"
	@$(PIP) install --editable .
	@touch $@

$(INSTALLED): $(SERVES)
	@echo "== installing the tools of tests and checks"
	@$(PIP) install --editable '.[dev]'
	@$(PIP) install --editable '.[cluster]' || \
	  echo "== NIXL or Ray cannot be installed here: no units on several hosts, and their tests are skipped"
	@touch $@

# The CPU kernels are compiled once here, not while somebody waits for the first answer.
$(WARM): $(SERVES) $(wildcard src/kvloom/kernels/cpu/*.py src/kvloom/kernels/cpu/*/*.py)
	@if $(BIN)/python -c '$(HAS_WARM)'; then echo "== compiling the kernels, which takes minutes and is done once"; $(BIN)/python -m kvloom.kernels.cpu.warm; fi
	@touch $@

# Debian's package is unpacked here, and not installed: that would start a service. Its lists may be missing on a bare
# machine, and only root may fetch them.
$(BIN)/prometheus: | $(BIN)/pip
	@echo "== unpacking Prometheus"
	@rm -rf $(VENV)/prometheus && mkdir $(VENV)/prometheus
	@cd $(VENV)/prometheus && { apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }; } && \
	  dpkg-deb --fsys-tarfile prometheus_*.deb | tar -xf - ./usr/bin/prometheus ./usr/bin/promtool && rm prometheus_*.deb
	@ln -sf ../prometheus/usr/bin/promtool $(BIN)/promtool && ln -sf ../prometheus/usr/bin/prometheus $@
