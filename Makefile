# Commands for users, developers and CI. `make help` lists them.
# All outputs are in .venv and target. Two commands may run at the same time.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
UV_VERSION := 0.13.8
# `make serve TORCH=cpu`: PyTorch's own build for CPUs, without 2.7 GB of CUDA libraries.
TORCH ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BUILT := $(VENV)/.built
BUILT_FOR_TESTS := $(VENV)/.built-for-tests
RUST_SOURCES := $(shell find router -name '*.rs' -o -name Cargo.toml) \
    Cargo.toml Cargo.lock pyproject.toml python/mla_router/__init__.py

# The extension leaves Python's symbols to the interpreter that loads it: no libpython is needed.
export PYO3_BUILD_EXTENSION_MODULE := 1
# uv installs no bytecode. If it cannot be written either, each process compiles torch's 2,000 files again.
unexport PYTHONDONTWRITEBYTECODE
# Only `make build` makes the package current, one process at a time.
LOCKED := @mkdir -p target && flock target/.make.lock $(MAKE) --no-print-directory

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: serve
serve: build ## start the router and 2 CPU workers on the small model; FLAGS="..." for more
	@exec $(BIN)/python -m mla_router.launch_server --dp-size 2 --device cpu $(FLAGS)

# -- what the CI runs ------------------------------------------------------------------------------

STAGES := lint test-rust build-for-tests test-python
# Discovery is tested against a kube-apiserver, if one was built: that takes longer than all of this.
STAGES += $(if $(wildcard target/kubernetes/kube-apiserver),test-kubernetes,skip-kubernetes)

.PHONY: test test-all
test: ## all stages of CI
	@.ci/stages $(MAKE) $(STAGES)

test-all: ## for releases: also the slow tests (needs network)
	@.ci/stages $(MAKE) $(filter-out test-python %-kubernetes,$(STAGES)) \
	  test-search test-wheel test-kubernetes test-clients

.PHONY: lint lint-python lint-rust
lint: ## formatting, lints and types, as in CI; clippy compiles while packages are installed
	@$(MAKE) --no-print-directory -j2 --output-sync=target lint-rust lint-python

lint-python: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

lint-rust:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings

.PHONY: fmt
fmt: venv ## format all sources, and apply automatic fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	cargo fmt --all

.PHONY: test-rust test-python test-search test-wheel
# Many of them wait for time limits.
test-rust: export RUST_TEST_THREADS ?= $(shell expr 6 '*' $$(nproc))
test-rust: ## the router's tests
	cargo test --workspace --locked

PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal --durations=20

test-python: build-for-tests ## the Python tests, end-to-end ones included; ARGS="tests/launch -k drain" for some
	$(PYTEST) $(ARGS)

test-search: build-for-tests ## the same with the tests marked `slow` and longer searches for counterexamples
	$(PYTEST) --run-slow --hypothesis-profile=search $(ARGS)

test-wheel: build ## the wheel and the sdist in release form: look inside, install the wheel in a fresh venv
	CARGO_PROFILE=release $(BIN)/python -m pytest tests/packaging

.PHONY: mutants
mutants: build-for-tests ## mutation tests: changes to the sources that no test finds; ARGS="rust --sample 40" or "python ..."
	$(BIN)/python tests/mutants/run.py $(ARGS)

# In .venv, where a .pth file starts it in child processes as well.
COVERAGE := $(BIN)/python -m coverage
.PHONY: coverage
coverage: build-for-tests ## lines of worker and launch that no test runs, child processes included; ARGS="tests/grammar" for some, KEEP=1 adds to earlier runs
	$(BIN)/uv pip install --quiet --system-certs coverage==7.17.4
	$(if $(KEEP),,$(COVERAGE) erase)
	-$(COVERAGE) run -m pytest -n auto --dist worksteal $(ARGS)
	$(COVERAGE) combine --quiet --append
	$(COVERAGE) report

.PHONY: coverage-rust
coverage-rust: ## lines of the router that no Rust test runs (rustup installs llvm-tools)
	rustup component add llvm-tools
	cargo install --quiet --locked --debug --version 0.9.1 --root target/coverage cargo-llvm-cov
	PATH=$(abspath target/coverage/bin):$$PATH cargo llvm-cov --locked -p mla-router \
	  --ignore-run-fail --show-missing-lines

# Versions, or paths of interpreters
PYTHONS := 3.12 3.13
UNDER_PYTHONS := tests/packaging tests/worker tests/launch tests/router tests/scheduler tests/server
.PHONY: test-pythons
test-pythons: build-for-tests ## imports and tests under the other Pythons that are supported (PYTHONS="3.12 3.13")
	TORCH=$(TORCH) .ci/test-pythons "$(PYTHONS)" $(or $(ARGS),$(UNDER_PYTHONS))

.PHONY: test-kubernetes
test-kubernetes: build-for-tests ## discovery and the Helm chart against a kube-apiserver; builds it and Helm first (12 minutes, root for apt)
	tests/kubernetes/build_apiserver.sh target/kubernetes
	tests/kubernetes/build_helm.sh target/kubernetes
	cargo clippy -p mla-router --all-targets --features kubernetes --locked -- -D warnings
	cargo test -p mla-router --features kubernetes --locked --test serving -- \
	  kubernetes:: --ignored --nocapture --test-threads 1
	cargo test -p mla-router --features kubernetes --locked --lib -- discovery::
	cargo build -p mla-router --features kubernetes --locked
	cp target/debug/mla-router target/kubernetes/mla-router
	$(BIN)/python -m pytest tests/kubernetes

.PHONY: skip-kubernetes
skip-kubernetes:
	@printf '%6d  need a kube-apiserver: make test-kubernetes\n' \
	  $$(grep -c '#\[ignore' router/tests/serving/kubernetes/mod.rs) >> "$${SKIPPED_TESTS:-/dev/stdout}"

.PHONY: test-dashboard
test-dashboard: build ## the dashboard in headless Chromium (5 minutes); its pictures go to docs/
	DASHBOARD_PICTURES=docs $(BIN)/python -m pytest tests/e2e/test_dashboard.py tests/e2e/test_dashboard_chat.py

.PHONY: test-clients
test-clients: build ## third-party clients from PyPI (10 minutes); ARGS="openai_sdk" for some
	$(BIN)/python tests/clients/run.py $(ARGS)

.PHONY: test-peers
test-peers: build ## server tests of vLLM and of SGLang's router, unmodified, from PyPI, and with SGLANG_SRC=DIR of SGLang; ARGS="vllm -k logprobs"
	$(BIN)/python tests/peers/run.py $(ARGS)

.PHONY: sizes
sizes: ## print the lengths of the sources
	@$(PYTHON) tests/file_sizes.py

# -- prerequisites ---------------------------------------------------------------------------------

.PHONY: venv
venv: ## make .venv with the packages of requirements.lock
	$(LOCKED) $(INSTALLED)

.PHONY: build
build: ## compile the router and install it in .venv
	$(LOCKED) $(BUILT)

.PHONY: build-for-tests
build-for-tests: ## the same without optimization, which compiles faster, unless `make build` is current
	$(LOCKED) $(BUILT_FOR_TESTS)

# ensurepip: Debian keeps it in a package of its own.
# --system-certs: uv's own list does not know a company's proxy. pip, where uv fails, takes five times as long.
$(INSTALLED): requirements.lock
	@.ci/check-tools "$(PYTHON)"
	@.ci/announce-install "$(TORCH)"
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || .ci/install-python-venv
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION) \
	  && .ci/install-locked $(BIN) $(TORCH) \
	  || { [ -z "$(TORCH)" ] && $(BIN)/python -m pip install --require-hashes -r requirements.lock; }
	@touch $@

# Removed first: written over, the library would change under a router that runs from it. PIP_QUIET: pip names each
# package that no extra asks for.
$(BUILT): $(INSTALLED) $(RUST_SOURCES)
	@rm -f python/mla_router/_router.abi3.so
	@echo "Compiling the router: some minutes the first time, seconds later"
	@PIP_QUIET=1 VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --release --locked
	@touch $@ $(BUILT_FOR_TESTS)

$(BUILT_FOR_TESTS): $(INSTALLED) $(RUST_SOURCES)
	rm -f python/mla_router/_router.abi3.so $(BUILT)
	PIP_QUIET=1 VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --locked
	@touch $@

.PHONY: lock
lock: venv ## write requirements.lock from pyproject.toml
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	  --extra worker --extra test --no-emit-package mla-router \
	  --custom-compile-command "make lock" -o requirements.lock pyproject.toml

# --sdist compiles the unpacked sdist, which has no benches. Each profile has another path, and so other outputs: they go.
.PHONY: wheel
wheel: venv ## the wheel and the sdist, in dist; PGO=1: a profile-guided build (10 minutes; needs rustup's llvm-tools)
	$(BIN)/maturin build --release --locked --out dist $(if $(PGO),--pgo --target-dir target/pgo,--sdist)
	$(if $(PGO),$(BIN)/maturin sdist --out dist && rm -rf target/pgo)

.PHONY: clean
clean: ## remove all outputs
	rm -rf $(VENV) target dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f python/mla_router/_router*.so
	find . -name __pycache__ -prune -exec rm -rf {} +
