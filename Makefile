# Two commands for everyone: `make demo`, `make test`. Both set up .venv by themselves; PyTorch comes first and pinned,
# so that nothing else decides which build of it is installed.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
RUN := $(VENV)/bin
NATIVE := CMakeLists.txt $(shell find src/coattn/native/csrc -type f 2>/dev/null)
FORMATTED = $(shell find src/coattn/native/csrc src/coattn/kernels/cuda tests/native tests/kernels/cuda -regex '.*\.\(cpp\|h\|inl\|cu\|cuh\)')

.PHONY: demo test test-quick test-native test-native-arm lint format bench docs docs-site clean setup

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml lab/pyproject.toml $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || \
	  { echo "coattn needs Python 3.11, 3.12, 3.13 or 3.14. Hint: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --quiet --disable-pip-version-check "$(TORCH)"
	$(RUN)/python -m pip install --quiet --quiet --disable-pip-version-check --editable ".[dev]" --editable lab
	@touch $@

demo: setup
	$(RUN)/coattn demo

test: setup
	OMP_NUM_THREADS=1 $(RUN)/python scripts/run_tests.py $(ARGS)

test-quick: setup
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n auto --dist loadfile -q -m "not slow and not model" $(ARGS)

test-native:
	bash scripts/test_native.sh

test-native-arm:
	bash scripts/test_native.sh arm

lint: setup
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/clang-format --dry-run --Werror $(FORMATTED)

format: setup
	$(RUN)/ruff check --fix --quiet .
	$(RUN)/ruff format --quiet .
	$(RUN)/clang-format -i $(FORMATTED)

bench: setup
	$(RUN)/coattn-lab bench ops --quick

docs: setup
	$(RUN)/python scripts/make_reference.py

docs-site: setup
	$(RUN)/python -c "import furo, myst_parser, sphinx" 2>/dev/null || $(RUN)/python -m pip install --quiet --editable ".[docs]"
	$(RUN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/site

clean:
	rm -rf $(VENV) build dist demo .mypy_cache .ruff_cache src/coattn/_native*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
