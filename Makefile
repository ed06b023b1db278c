# Two commands do all the set-up: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test chaos lint format bench lock clean

demo: $(READY)
	$(BIN)/subagent-tasks demo $(if $(DIR),--path $(DIR)) $(if $(MODEL),--model $(MODEL))

# Most tests wait for processes: two at a time take little more than half. A file stays together, as its fixtures do.
# `HYPOTHESIS_PROFILE=long make test` gives the property tests thirty times as many examples.
test: $(READY)
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

chaos: $(READY)
	$(BIN)/python tests/chaos --seconds $(or $(SECONDS),60) --seed $(or $(SEED),1)

bench: $(READY)
	$(BIN)/python -m benchmarks

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Every pin with its hashes, for every platform, and no word on where packages come from.
lock: $(READY)
	$(BIN)/uv pip compile pyproject.toml --all-extras --group dev --group demo-model --universal --python-version 3.11 \
		--generate-hashes --no-emit-index-url --no-emit-find-links --no-header --quiet --output-file requirements.lock

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	$(BIN)/python -m compileall -q broker_config subagent_tasks
	@touch $(READY)

clean:
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .hypothesis
