# Everything runs in .venv; a second run skips the installation. PIP_FLAGS is handed to every pip install.
PYTHON ?= python3
PIP_FLAGS ?=
# What the demo generates with: transformers or sglang.
ENGINE ?= transformers
BIN := .venv/bin
STAMP := .venv/.installed
SGLANG_STAMP := .sglang/.installed
PLUGIN_STAMP := .sglang/.plugin
TRL_STAMP := .trl/.installed

.PHONY: install sglang-cpu secrets demo lab test test-slow test-long test-stress verdict check bench bench-trl chaos soak

install: $(STAMP)

$(STAMP): requirements.lock pyproject.toml trainer/lab/pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("%s is Python %d.%d: make PYTHON=... names a 3.11 or newer" % (sys.executable, *v[:2]))'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -r requirements.lock
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --no-deps -e . -e trainer/lab
	touch $@

# Passwords and tokens for docker compose, drawn once.
secrets:
	deploy/secrets.sh

# A real SGLang that runs without a GPU, with our plugin in it (deploy/sglang-cpu/README.md).
sglang-cpu: $(PLUGIN_STAMP)
	@.sglang/bin/python -m pip list --format=freeze | grep -E '^(sglang|dvp-sglang|torch|transformers)=='

$(SGLANG_STAMP): $(wildcard deploy/sglang-cpu/*.txt)
	@echo "building .sglang: SGLang for the CPU, about 2.3 GB, 2 minutes"
	$(PYTHON) -m venv --clear .sglang
	.sglang/bin/python -m pip install --quiet $(PIP_FLAGS) -r deploy/sglang-cpu/requirements.txt
	.sglang/bin/python -m pip install --quiet $(PIP_FLAGS) --no-deps -r deploy/sglang-cpu/requirements-nodeps.txt
	touch $@

$(PLUGIN_STAMP): $(SGLANG_STAMP) $(wildcard services/dvp_rl/dvp/*.py services/dvp_rl/sglang_plugin/*.py deploy/dvp-sglang/*) \
		$(wildcard deploy/sglang-cpu/shims/*.* deploy/sglang-cpu/shims/*/*.py)
	.sglang/bin/python -m pip install --quiet $(PIP_FLAGS) --no-deps --force-reinstall \
		./deploy/sglang-cpu/shims ./deploy/dvp-sglang
	touch $@

demo: install $(if $(filter sglang,$(ENGINE)),sglang-cpu)
	$(BIN)/python -m deploy.demo --engine $(ENGINE) $(ARGS)

# Every study of trainer/lab/results; `dvp-lab page` draws one again.
lab: install sglang-cpu
	$(BIN)/dvp-lab signature --out trainer/lab/results
	$(BIN)/dvp-lab overlap --out trainer/lab/results
	$(BIN)/dvp-lab rho --out trainer/lab/results
	$(BIN)/dvp-lab collapse --out trainer/lab/results

# Three at once, also on two cores: most of them wait for processes and clocks. ARGS=-n0 for one, with a debugger.
test: install
	$(BIN)/python -m pytest -n 3 --dist loadfile $(ARGS)

test-slow: install sglang-cpu
	$(BIN)/python -m pytest -m "slow and not long" $(ARGS)

# What needs longer than a CI should take. Every one has a smaller sibling among the others.
test-long: install sglang-cpu
	$(BIN)/python -m pytest -m long $(ARGS)
	$(MAKE) chaos soak

# The tests while every core is busy; ARGS="fast" for one group.
test-stress: install sglang-cpu
	$(BIN)/python -m tests.stress $(ARGS)

# All tests but the long ones, for .ci/run: what fails is run once more, alone, and named FLAKY if it passes then.
verdict: install sglang-cpu
	$(BIN)/python -m tests.verdict $(ARGS)

# A storm of 1,000 kills, outages and troubles on a real Redis; every group and token is accounted for. An hour and more.
chaos: install
	$(BIN)/python -m tests.chaos $(ARGS)

# Half an hour under load with kills: memory, descriptors, keys and folders have to stay where they are.
soak: install
	$(BIN)/python -m tests.chaos.soak $(ARGS)

check: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install sglang-cpu
	$(BIN)/python -m tests.benchmarks $(ARGS)

# TRL's GRPOTrainer beside the whole system, in an environment of its own.
bench-trl: install $(TRL_STAMP)
	$(BIN)/python -m tests.benchmarks.against_trl $(ARGS)
	$(BIN)/python -m tests.benchmarks.tables

$(TRL_STAMP): tests/benchmarks/trl-requirements.txt
	$(PYTHON) -m venv --clear .trl
	.trl/bin/python -m pip install --quiet $(PIP_FLAGS) -r $<
	touch $@
