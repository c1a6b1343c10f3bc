# `make demo` and `make test` need a Python from 3.11 on and nothing else: both build .venv first where it is missing or old.
#   make demo ARGS=--json                  the demonstration, its result as one JSON object on stdout
#   make test ARGS="-k placement"          some of the tests
#   make bench-elastic ARGS="--rebalances 5 --cycles 1"     a short run of what takes half an hour
#   make test PYTHON=python3.12            another interpreter (for a .venv that is not there yet)
#   make test PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"      a CPU build of torch

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=

INSTALLED := .venv/.installed

# A demonstration, a test or a benchmark reports nothing to anybody.
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: demo test test-full gpu-test check lint format-check types bench bench-elastic install clean

demo: install
	@.venv/bin/ray-moe demo $(ARGS)

test: install
	@.venv/bin/python -m pytest -m "not full and not gpu" $(ARGS)

test-full: install
	@.venv/bin/python -m pytest -m "not gpu" $(ARGS)

# On a CUDA host, with the Python there that has torch, transformers and pytest: these need neither Ray nor pydantic.
gpu-test:
	@$(PYTHON) -m pytest -m gpu tests/unit/test_loop.py tests/unit/test_engine_parity.py tests/unit/test_sampling.py $(ARGS)

check: lint format-check types test

lint: install
	@.venv/bin/ruff check .

format-check: install
	@.venv/bin/ruff format --check .

types: install
	@.venv/bin/mypy

bench: install
	@.venv/bin/python -m ray_moe.bench $(ARGS)

# Live changes under load: writes benchmarks/elastic.json and the clients' timestamps, which nothing else does.
bench-elastic: install
	@.venv/bin/python -m ray_moe.bench elastic $(ARGS)

install: $(INSTALLED)

# The installer's words go to stderr: stdout belongs to what was asked for. The stamp comes last, so that an interrupted
# installation is taken up again.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("ray-moe needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; name another one: make PYTHON=...")' >&2
	@echo "ray-moe: installing into .venv (two gigabytes, minutes on a fresh machine)" >&2
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv >&2
	@.venv/bin/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[dev]" >&2
	@touch $@
	@echo "ray-moe: installed" >&2

clean:
	@rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
