PYTHON ?= python3
RUN := .venv/bin
DATA ?=
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: setup demo test test-all lint

setup: .venv/.done

.venv/.done: constraints.txt pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "error: Python 3.11 or newer is needed"; exit 2; }
	$(PYTHON) -m venv .venv
	$(RUN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	@touch $@

demo: setup
	@$(RUN)/python -m eagleray.cli.demo $(if $(DATA),"$(DATA)")

test: setup
	$(RUN)/python -m pytest -q -m "not slow" -n 2 --dist loadfile

# The slow tests run one at a time: they start servers and measure seconds, and -v names each of them as it begins.
test-all: setup
	@status=0; \
	$(RUN)/python -m pytest -q -m "not slow" -n 2 --dist loadfile || status=$$?; \
	$(RUN)/python -m pytest -v -m slow --durations=25 || status=$$?; \
	exit $$status

lint: setup
	$(RUN)/ruff check
	$(RUN)/ruff format --check
	$(RUN)/mypy
