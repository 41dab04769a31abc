PYTHON ?= python3
RUN := .venv/bin
DATA ?=
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Where no bytecode is written, each process compiles PyTorch for half a minute before it begins. Setup has it written for
# what commands import.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo mission test test-all soak faults fuzz lint audit docs

# One environment has two stamps: .run says that the package and what it needs are in it, .done that the developers' tools
# are too. $(1) is what is installed, $(2) says how much that is.
define install
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "error: Python 3.11 or newer is needed"; exit 2; }
	@echo "setup: packages come into .venv, some minutes and $(2); its log is .venv/setup.log"
	@$(PYTHON) -m venv .venv
	@$(RUN)/python -m pip install --no-compile -c constraints.txt -e "$(1)" > .venv/setup.log 2>&1 || \
		{ tail -n 20 .venv/setup.log; echo "error: setup failed; the whole log is .venv/setup.log"; exit 2; }
	@$(RUN)/python -c "import eagleray.runs.pretrain, mlflow, ray.train, ray.tune"
endef

setup: .venv/.done

.venv/.done: constraints.txt pyproject.toml
	$(call install,.[dev],8 GB)
	@touch $@

.venv/.run: constraints.txt pyproject.toml
	$(call install,.,7 GB)
	@touch $@

demo: $(or $(wildcard .venv/.done),.venv/.run)
	@$(RUN)/python -m eagleray.cli.demo $(if $(DATA),"$(DATA)")

# The walk of a user from end to end: a cluster that loses a worker and a node, a bucket, a sweep, an export. FOLDER= keeps
# what it writes, FROM= and UNTIL= name stations, and BREAK= plants a fault that it must report.
mission: setup
	@PYTHONPATH=tests $(RUN)/python -m mission.walk $(if $(FOLDER),--folder "$(FOLDER)") $(if $(FROM),--from "$(FROM)") \
		$(if $(UNTIL),--until "$(UNTIL)") $(if $(BREAK),--break "$(BREAK)")

# Four processes on two cores: tests wait for others at times.
test: setup
	$(RUN)/python -m pytest -q -m "not slow" -n 4 --dist loadfile --no-loadscope-reorder

# What has passed on this tree is not run again, so a run that was stopped, or a failure that was not of the tree, costs only
# what is left. PART=tests/chaos, or PART='kills or notice' as pytest's -k has it, is a part. -v names each slow test as it
# begins. Slow ones have one niceness: Ray gives the workers of jobs a high one, and they would wait for the tests beside them.
PART ?=
SOME = $(if $(filter tests/%,$(firstword $(PART))),$(PART),$(if $(PART),-k "$(PART)"))
ALL = $(RUN)/python -m pytest -p helpers.continued $(SOME)
test-all: setup
	@$(ALL) -q -n 4 -m "not slow" --dist loadfile --no-loadscope-reorder; fast=$$?; \
	case $$fast in 0|1|5) ;; *) exit $$fast ;; esac; \
	nice -n 19 $(ALL) -v -n 3 -m "slow and not campaign" --dist loadgroup --durations=40; slow=$$?; \
	case $$fast.$$slow in 0.0|0.5|5.0) ;; *) exit 1 ;; esac; \
	[ -n "$(PART)" ] || $(RUN)/python benchmarks/ratios.py

# A run under faults at random, for HOURS=1 or more; what it went through is printed as it goes and as JSON at the end.
HOURS ?= 1
soak: setup
	HOURS=$(HOURS) $(RUN)/python -m pytest -q tests/chaos/test_soak.py

# An error or a power loss at every call of a short run to its disk and its store, one after the other; and faults of
# training, which a run must name.
faults: setup
	STRIDE=1 $(RUN)/python -m pytest -v -n 2 -m campaign tests/runs/test_faults.py tests/benchmarks/test_faults.py

# New inputs for all tests that draw some: with 5, a hundred thousand tars, ten thousand images and recipes each, and two
# thousand indexes, cards, manifests, tables, Parquet and COCO files each. Without FUZZ in the environment, `-m campaign -k
# fuzz` draws a fifth of that, always the same.
FUZZ ?= 5
fuzz: setup
	FUZZ=$(FUZZ) $(RUN)/python -m pytest -v -rP -n 2 -m campaign -k fuzz tests

# Known weaknesses of the pinned packages. It asks the index of Python packages and so needs a network: a package that cannot
# be looked up fails it. The index knows no local versions, such as 2.13.0+cu130, of which it asks for what is before the plus.
# Its tool has an environment of its own.
audit: .venv-audit/.done
	@sed 's/+[A-Za-z0-9.]*$$//' constraints.txt > .venv-audit/requirements.txt
	@.venv-audit/bin/pip-audit --strict --requirement .venv-audit/requirements.txt --no-deps --disable-pip

.venv-audit/.done:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install -q pip-audit==2.9.0
	@touch $@

lint: setup
	$(RUN)/ruff check
	$(RUN)/ruff format --check
	$(RUN)/mypy
	$(RUN)/python docs/weight.py
	$(RUN)/python docs/subjects.py

# The pages of docs/ as site/index.html, which opens without a network; a dead link ends it. Its tool has an environment of
# its own: no page imports the package, whose environment has 8 GB. What is written from the code is kept in docs/, and tests
# say when it is out of date.
docs: .venv-docs/.done
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict
	@echo "docs: open site/index.html"

.venv-docs/.done: constraints.txt
	@echo "docs: mkdocs comes into .venv-docs, 160 MB; its log is .venv-docs/setup.log"
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install -c constraints.txt mkdocs-material > .venv-docs/setup.log 2>&1 || \
		{ tail -n 20 .venv-docs/setup.log; echo "error: the log is .venv-docs/setup.log"; exit 2; }
	@touch $@
