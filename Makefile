# Two commands matter: `make demo` and `make test`. Both install what they need, pinned, and need root.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

VENV := .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
PYTHON ?= python3
PACKAGES := user-mode-linux mmdebstrap debian-archive-keyring e2fsprogs iproute2 openssh-client gcc libc6-dev patch \
	python3-venv
TEST_PACKAGES := qemu-system-x86
SCENARIOS := fabric reject access engram default power_loss tp2
WHEELS := $(or $(GB10_CACHE),/var/cache/gb10-fleet)/wheels

.PHONY: help
help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

.PHONY: packages test-packages
test-packages: PACKAGES += $(TEST_PACKAGES)
packages test-packages:
	@missing=(); for package in $(PACKAGES); do
	  dpkg-query -W -f '$${db:Status-Status}' "$$package" 2>/dev/null | grep -qx installed || missing+=("$$package"); done
	if (($${#missing[@]})); then
	  if (($$(id -u))); then echo "run as root, or install: apt-get install $${missing[*]}" >&2; exit 1; fi
	  apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install "$${missing[@]}"
	fi

$(VENV)/installed: requirements.txt | packages
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, found " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q --disable-pip-version-check --require-hashes -r requirements.txt
	touch $@

$(VENV)/installed-dev: requirements-dev.txt $(VENV)/installed | test-packages
	$(VENV)/bin/pip install -q --disable-pip-version-check --require-hashes -r requirements-dev.txt
	touch $@

.PHONY: demo
demo: $(VENV)/installed ## Boot four embedded hosts and serve a model over them
	@$(PYTHON) -m embedded up
	ansible-playbook site.yml
	echo
	echo "Served over four hosts. Try it:"
	echo "  curl http://198.18.0.11:8000/v1/completions -H 'Content-Type: application/json' \\"
	echo "    -d '{\"model\": \"tiny\", \"prompt\": \"hello\", \"max_tokens\": 12}'"
	echo "Look:  $(VENV)/bin/ansible-playbook playbooks/status.yml     End:  make down"

.PHONY: down
down: ## Power the embedded hosts off and remove every trace of them
	@$(PYTHON) -m embedded down

.PHONY: lint
lint: $(VENV)/installed-dev ## Lint everything at production profile
	yamllint -s .
	ansible-lint -q
	ruff check .
	ruff format --check .
	mypy
	git ls-files -z '*.sh' .ci/run | xargs -0 -r shellcheck

.PHONY: unit
unit: $(VENV)/installed-dev ## Run the unit tests
	pytest

# The patches are tested on the files of the released wheel; its Python files are the same for both processors.
.PHONY: wheels
wheels: $(VENV)/installed
	@ls $(WHEELS)/vllm-0.33.0-*.whl >/dev/null 2>&1 || $(VENV)/bin/pip download -q --disable-pip-version-check --no-deps \
	  --only-binary=:all: --python-version 3.12 --implementation cp --abi abi3 --platform manylinux_2_28_x86_64 \
	  -d $(WHEELS) vllm==0.33.0

.PHONY: test
test: $(VENV)/installed-dev wheels ## Run everything that CI runs
	@trap '$(PYTHON) -m embedded.guests down; $(PYTHON) -m embedded down' EXIT
	tests/run $(SCENARIOS)

.PHONY: requirements
requirements: ## Resolve requirements*.in anew, hashes included
	@scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT
	$(PYTHON) -m venv "$$scratch" && "$$scratch/bin/pip" install -q pip-tools
	for name in requirements requirements-dev; do "$$scratch/bin/pip-compile" -q --generate-hashes --strip-extras \
	  --no-header --no-annotate --no-emit-index-url --no-emit-find-links --no-emit-options -o $$name.txt $$name.in; done

.PHONY: clean
clean: down ## Also remove the virtual environment; the cache in /var/cache/gb10-fleet stays
	@rm -rf $(VENV) .embedded .cache
