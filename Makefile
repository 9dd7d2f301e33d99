# Two commands do all the set-up: `make demo` and `make test`. `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
TOOLS  := .tools
OUT    ?= out

# The LLM engine: the GPU build where there is an NVIDIA driver, else the CPU build.
ENGINE := $(if $(shell command -v nvidia-smi),llm-gpu,llm-cpu)
# A CPU-only machine takes torch from PyTorch's CPU index, unless pip already finds that wheel by itself.
TORCH_CPU := 2.13.0+cpu
CPU_INDEX := https://download.pytorch.org/whl/cpu
NIXL := nixl==1.5.2 nixl-cu12==1.5.1

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ------------------------------------------------------------------ set-up
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	index=(); if [[ $(ENGINE) == llm-cpu ]] && ! $(BIN)/pip install --quiet --dry-run --no-deps torch==$(TORCH_CPU) 2>/dev/null; \
	  then index=(--extra-index-url $(CPU_INDEX)); fi; \
	$(BIN)/pip install --quiet --progress-bar off "$${index[@]}" -e '.[head,$(ENGINE),diffusion]'
	# Some torchvision builds break beside this torch; no text model and no diffusers pipeline needs them.
	$(BIN)/python -c 'import torchvision' 2>/dev/null || $(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet --progress-bar off -e '.[dev]'
	# What hands KV blocks from engine to engine, without CUDA's libraries; where it cannot be had, its tests are skipped.
	$(BIN)/pip install --quiet --progress-bar off --no-deps $(NIXL) || echo 'no NIXL here: examples/disaggregated will not run'
	touch $@

$(TOOLS)/protos/installed: tools/requirements-protos.txt
	$(PYTHON) -m venv $(TOOLS)/protos
	$(TOOLS)/protos/bin/pip install --quiet --progress-bar off -r $<
	touch $@

$(TOOLS)/node_modules/installed: tools/package.json
	mkdir -p $(TOOLS) && cp tools/package.json $(TOOLS)/package.json
	npm install --prefix $(TOOLS) --silent --no-audit --no-fund
	touch $@

NODE_CLIENT := examples/clients/node/node_modules/installed
$(NODE_CLIENT): examples/clients/node/package.json
	npm install --prefix examples/clients/node --silent --no-audit --no-fund
	touch $@

.PHONY: install
install: $(VENV)/installed ## Install the mesh with both real engines into .venv

.PHONY: install-dev
install-dev: $(VENV)/installed-dev $(TOOLS)/protos/installed $(TOOLS)/node_modules/installed $(NODE_CLIENT) ## Install also what the tests need

# ------------------------------------------------------------------ run
.PHONY: demo
demo: install ## Start the shapes pipeline, make one picture, say where it is
	$(BIN)/python examples/shapes/demo.py --out $(OUT)

.PHONY: test
test: install-dev ## Run all tests, with real engines
	$(BIN)/python -m pytest

.PHONY: test-fast
test-fast: install-dev ## Run the tests that start no real engine
	$(BIN)/python -m pytest -m 'not engines'

.PHONY: clients
clients: $(NODE_CLIENT) ## Install what the clients in other languages need (Debian, as root) and build them
	examples/clients/install-debian.sh
	for language in go java cpp ruby; do $(MAKE) --no-print-directory --silent -C examples/clients/$$language; done

# ------------------------------------------------------------------ keep the house in order
.PHONY: check
check: install-dev lint-protos ## Lint, types, contract lint and drift, import arrows
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/contract

.PHONY: lint-protos
lint-protos: $(TOOLS)/node_modules/installed
	$(TOOLS)/node_modules/.bin/buf lint

.PHONY: protos
protos: $(TOOLS)/protos/installed ## Generate common/stagemesh/v1 from protos/
	PATH="$(CURDIR)/$(TOOLS)/protos/bin:$$PATH" $(TOOLS)/protos/bin/python tools/generate_protos.py

.PHONY: clean
clean: ## Remove what make installed
	rm -rf $(VENV) $(TOOLS) examples/clients/node/node_modules $(OUT)
