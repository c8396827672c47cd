# One command each. `make` alone lists them.
PYTHON ?= python3
# Tests side by side: most of them wait for processes, so one more than two cores have.
JOBS ?= 3
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test check proofs docs lock clean schedules mutations crash-matrix

help:
	@echo "make demo    show the whole runtime on real processes"
	@echo "make test    all tests (real PostgreSQL, SQLite, Temporal, git)"
	@echo "make check   format, lint, types, layers, generated pages"
	@echo "make proofs  which test proves which scenario, on which database"
	@echo "make schedules N=20000   random schedules; SEED=... replays one"
	@echo "make mutations           each law broken on purpose, and the test that notices"
	@echo "make crash-matrix        every boundary x kill, pause, lost answer; writes its page"
	@echo "make docs    write the generated pages"
	@echo "make lock    lock the dependencies by hash (needs uv)"
	@echo "make clean   remove the environment and all caches"

# The locked environment. Made again only when a lock or the project's own metadata changes.
$(STAMP): requirements/dev.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(STAMP)

.venv: $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m demo

test: $(STAMP)
	$(BIN)/pytest -n $(JOBS) --dist worksteal

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/states_diagram.py --check

proofs: $(STAMP)
	@$(BIN)/pytest --collect-only --proofs | sed -n '/= proofs =/,$$p'

N ?= 4000
schedules: $(STAMP)
	$(BIN)/python tools/schedules.py -n $(N) $(if $(SEED),--seed $(SEED)) $(if $(FIRST),--first $(FIRST))

mutations: $(STAMP)
	$(BIN)/python tools/mutations.py $(ONLY)

crash-matrix: $(STAMP)
	$(BIN)/python tools/crash_matrix.py

docs: $(STAMP)
	$(BIN)/python tools/states_diagram.py

# `--no-emit-index-url`: a lock names no registry, so that anybody's own is used.
LOCK := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-header
lock:
	$(LOCK) pyproject.toml -o requirements/runtime.txt
	$(LOCK) --extra dev pyproject.toml -c requirements/runtime.txt -o requirements/dev.txt

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist .demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
