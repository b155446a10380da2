# Two commands for everyone: `make demo`, `make test`. Both set up .venv by themselves; PyTorch comes first and pinned,
# so that nothing else decides which build of it is installed.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
RUN := $(VENV)/bin
NATIVE := CMakeLists.txt $(shell find src/coattn/csrc -type f 2>/dev/null)

.PHONY: demo test test-native lint format bench docs clean setup

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "coattn needs Python 3.11, 3.12 or 3.13. Hint: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --quiet --disable-pip-version-check "$(TORCH)"
	$(RUN)/python -m pip install --quiet --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

demo: setup
	$(RUN)/coattn demo

test: setup
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n auto -q $(ARGS)

test-native:
	bash scripts/test_native.sh

lint: setup
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	find src/coattn/csrc src/coattn/ops/cuda tests/native -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | xargs $(RUN)/clang-format --dry-run --Werror

format: setup
	$(RUN)/ruff check --fix --quiet .
	$(RUN)/ruff format --quiet .
	find src/coattn/csrc src/coattn/ops/cuda tests/native -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | xargs $(RUN)/clang-format -i

bench: setup
	$(RUN)/coattn bench ops --quick

docs: setup
	$(RUN)/python scripts/make_reference.py

clean:
	rm -rf $(VENV) build dist demo .mypy_cache .ruff_cache src/coattn/_native*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
