# Two commands do everything: `make demo` and `make test`. Both create .venv on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PEERS  := .venv-peers
# One thread per process: federated clients are many small jobs, and threads only fight over the cores.
export OMP_NUM_THREADS := 1

.PHONY: demo test check format bench peers results bands clean

demo: $(READY)  ## FedAvg, FedBAT and SignSGD on a small real data set, about a minute and a half
	rm -rf runs/demo
	$(BIN)/fedbat compare --methods fedavg,fedbat,signsgd --clients 20 --per-round 5 --rounds 12 --epochs 2 --out runs/demo

test: $(READY) check  ## lint, types and all tests but those of a real deployment (`pytest -m deployment`)
	$(BIN)/pytest -q -n 2 -m "not deployment"

check: $(READY)  ## lint and types
	$(BIN)/ruff check src tests benchmarks scripts examples
	$(BIN)/ruff format --check -q src tests benchmarks scripts examples
	$(BIN)/mypy

format: $(READY)  ## rewrite the sources as `check` wants them
	$(BIN)/ruff check --fix src tests benchmarks scripts examples
	$(BIN)/ruff format src tests benchmarks scripts examples

bench: $(READY)  ## the speed figures of docs/performance.md
	$(BIN)/python benchmarks/steps.py
	$(BIN)/python benchmarks/wire.py
	$(BIN)/python benchmarks/rotation.py

results: $(READY)  ## RESULTS.md, CLAIMS.md, the figures and what docs/ say of the records, anew
	$(BIN)/fedbat reproduce --write
	$(BIN)/python scripts/cuda_page.py

peers: $(PEERS)/.ready  ## other simulators and this one on the same work, ten to twenty minutes
	$(PEERS)/bin/python benchmarks/peers.py

bands: $(READY)  ## record the accuracy bands anew (about ten minutes)
	$(BIN)/python -m tests.bands

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

$(PEERS)/.ready: pyproject.toml constraints.txt  # flwr and pfl pin versions that need not be ours
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --upgrade pip
	$(PEERS)/bin/pip install --quiet -c constraints.txt -e . "flwr[simulation]>=1.41,<2" "pfl>=0.6,<0.7"
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) dist build runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
