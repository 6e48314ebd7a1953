# Every target makes what it needs: `make demo` and `make test` work on a fresh machine with Python >= 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The tests start many interpreters: without cached bytecode each of them would compile every module of stoker again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint docs bench fuzz soak clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "stoker needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV) || { \
	  echo "no venv with pip in $(PYTHON) (Debian and Ubuntu part it off); trying its pip from outside"; \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; \
	} || { echo "install python3-venv, or name a whole Python: make PYTHON=/path/to/python3"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all]' --group dev
	@touch $@

demo: $(STAMP)
	$(BIN)/stoker demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/vulture
	$(BIN)/python -m tools.prose
	$(BIN)/zizmor --offline --quiet .github

# The documentation as a site in .site; every warning is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Many tests wait for other processes, so one more than there are cores keeps these busy; more than four would be noise to
# each other. The tests of a file stay together. Files run in their order, not the one with the most tests first: the few
# long tests of tests/e2e are then done early, and the many short ones of tests/unit keep all processes busy to the end.
test: $(STAMP)
	@$(MAKE) --no-print-directory --jobs 2 lint docs
	$(BIN)/python -m pytest -n $$($(BIN)/python -c 'import os; print(min(4, 1 + (os.cpu_count() or 1)))') --dist loadfile --no-loadscope-reorder

bench: $(STAMP)
	$(BIN)/python -m benchmarks

# Random fault schedules, as many as asked for: make soak SOAK='--schedules 100000'. A failing seed is printed with its command.
soak: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m soak $(SOAK)

# Coverage-guided fuzzing of every reader of bytes: docs/fuzzing.md. SECONDS= for each; READER= for one of them.
SECONDS ?= 60
FUZZ := .fuzz/packages

$(FUZZ)/.installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --constraint constraints.txt --target $(FUZZ) atheris
	@touch $@

fuzz: $(FUZZ)/.installed
	PYTHONPATH=$(FUZZ):tests $(BIN)/python -m fuzz $(if $(READER),'$(READER)') $(INPUT) --seconds $(SECONDS)

clean:
	rm -rf $(VENV) .site .fuzz .mypy_cache .ruff_cache .pytest_cache .hypothesis
