# make demo and make test set themselves up: a virtual environment in .venv, pinned packages, no model hub.
# On a machine with an NVIDIA driver the GPU flavour is installed. PYTHON=… picks the interpreter, SEED=… the demo's seed.
SHELL := /bin/bash
FLAVOUR := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
VENV := .venv
INSTALLED := $(VENV)/.installed-$(FLAVOUR)
MEMBERS := $(wildcard packages/*/pyproject.toml services/*/pyproject.toml environments/*/pyproject.toml)
SEED ?= 0
TESTS ?= tests
CODE := packages services environments examples tests benchmarks
PACKAGES := $(foreach part,core cli trainer orchestrator inference router,-p rollstream.$(part))

.PHONY: demo demo-control test lint install clean
.DEFAULT_GOAL := demo

$(INSTALLED): scripts/install.sh constraints/$(FLAVOUR).txt $(MEMBERS)
	scripts/install.sh $(VENV) $(FLAVOUR)
	@touch $@

install: $(INSTALLED)

demo: $(INSTALLED)
	$(VENV)/bin/python examples/reverse-text/demo.py --seed $(SEED)

demo-control: $(INSTALLED)
	$(VENV)/bin/python examples/reverse-text/demo.py --seed $(SEED) --control

test: $(INSTALLED)
	$(VENV)/bin/python -m pytest $(TESTS)

lint: $(INSTALLED)
	$(VENV)/bin/python -m ruff check $(CODE)
	$(VENV)/bin/python -m mypy $(PACKAGES)

clean:
	rm -rf $(VENV) outputs models .mypy_cache .pytest_cache .ruff_cache .hypothesis
