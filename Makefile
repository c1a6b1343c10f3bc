# `make demo` and `make test` need a Python from 3.11 on and nothing else: both build .venv first where it is missing or old.
#   make demo ARGS=--json                  the demonstration, its result as one JSON object on stdout
#   make test ARGS="-k placement"          some of the tests
#   make bench-elastic ARGS="--rebalances 5 --cycles 1"     a short run of what takes half an hour
#   make test PYTHON=python3.12            another interpreter (for a .venv that is not there yet)
#   make test PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"      a CPU build of torch
#
# A CUDA host without a package registry is given the repository and one archive, made where there is a registry:
#   make gpu-bundle                        .gpu/ray_cp312.tar.xz (40 MB, two minutes): Ray for the host's Python 3.12;
#                                          refused where archive and working tree together would exceed MAX_MIB, 60
#   mkdir -p .gpu/site && tar -C .gpu/site -xJf .gpu/ray_cp312.tar.xz && export PYTHONPATH=$PWD/.gpu/site:$PWD     there

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=

INSTALLED := .venv/.installed

# A demonstration, a test or a benchmark reports nothing to anybody.
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: demo test test-full gpu-test gpu-bench gpu-bundle check lint format-check types bench bench-elastic install clean

demo: install
	@.venv/bin/ray-moe demo $(ARGS)

test: install
	@scripts/tests.sh "not full and not gpu" $(ARGS)

test-full: install
	@scripts/tests.sh "not gpu" $(ARGS)

# On a CUDA host, with the Python there that has torch, triton, transformers, cupy and pytest: these need neither Ray nor
# pydantic, but for the test of a whole cluster, which is skipped without them. What takes several GPUs is skipped, with
# one line, where there are fewer. Benchmarks write their records to OUT, or print them.
gpu-test:
	@NCCL_NVLS_ENABLE=0 $(PYTHON) -m pytest -m gpu tests/kernels tests/gpu tests/unit/test_loop.py \
		tests/unit/test_engine_parity.py tests/unit/test_sampling.py tests/unit/test_dummy.py $(ARGS)

gpu-bench:
	@for name in layer exchange window migration engine; do \
		NCCL_NVLS_ENABLE=0 $(PYTHON) -m ray_moe.bench.gpu_$$name $(if $(OUT),--out $(OUT)) $(ARGS) || exit 1; done

gpu-bundle: install
	@scripts/gpu_bundle.sh

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
