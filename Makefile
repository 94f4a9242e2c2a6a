# Every verb makes its own .venv and installs what it needs, once per change of setup.cfg or constraints.txt.
#   make compare ARGS="--data diabetes --quick"      make test ARGS="-m slow"      make PYTHON=python3.12 test
# A machine without a GPU saves the CUDA libraries with
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make compare

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
NEWEST := .venv-newest
PINS := setup.cfg pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help compare study test coverage lint notebooks benchmark newest docs gallery gpu mnist clean

help:
	@echo 'make TARGET ARGS="..." passes options on; the first call of a target installs what it needs in $(VENV).'
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1~\2/p' Makefile | awk -F '~' '{ printf "%-11s %s\n", $$1, $$2 }'

compare: $(VENV)/.installed ## SVI, NUTS, Laplace, SWAG and MAP on a sine with a gap, results/report.html: two minutes
	$(BIN)/pyrobnn compare $(ARGS)

# ARGS="--data study_two_clusters --noise inferred" is a comparison of the whole study
study: $(VENV)/.installed ## SVI beside NUTS in a gap between the data: two minutes
	$(BIN)/python scripts/compare_svi_mcmc.py $(or $(ARGS),--quick)

test: $(VENV)/.installed-dev,tracking ## the tests that are not slow: a quarter of an hour the first time, which compiles; then minutes
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

# the share of lines that the tests run, and its floor (setup.cfg): hardly slower from Python 3.12 on, 1.4 times before
coverage: $(VENV)/.installed-dev,tracking ## the same with the share of lines that they run: up to 1.4 times as long
	COVERAGE_CORE=$$($(BIN)/python -c 'import sys; print("sysmon" if sys.version_info >= (3, 12) else "ctrace")') \
	  $(BIN)/python -m pytest -n 2 --dist worksteal --cov --cov-report=term $(ARGS)

lint: $(VENV)/.installed-dev,tracking ## ruff and mypy: a minute
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

notebooks: $(VENV)/.installed-notebooks ## the ten notebooks, stored with their figures: tens of minutes; short with ARGS=--smoke
	$(BIN)/python scripts/run_notebooks.py $(ARGS)

benchmark: $(VENV)/.installed-bench ## speed and scores beside the commit of the newest record: tens of minutes
	$(BIN)/python scripts/speed/run.py $(ARGS)

# what a user gets today: the newest versions, without constraints.txt, renewed at every call; their tests and speed beside
# the pinned ones, appended to scripts/newest/records.jsonl. Once for every release; ARGS="tests/compile" runs these tests alone
newest: $(VENV)/.installed-dev,tracking ## tests and speed on the newest versions of everything, beside the pinned ones: longer than test
	test -d $(NEWEST) || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[dev,bench,tracking]'
	$(NEWEST)/bin/python scripts/newest/run.py --pinned $(BIN)/python $(ARGS)

# with a network ARGS="-b linkcheck" tries the addresses of other sites
docs: $(VENV)/.installed-docs ## the site in docs/_build/html, offline: minutes
	$(BIN)/python -m sphinx -W --keep-going -n -b html docs docs/_build/html $(ARGS)

# each picture of the gallery by its script, those of the stories by the code of the page
gallery: $(VENV)/.installed ## the pictures of docs/gallery and docs/stories: some minutes
	cd docs/_static && for script in ../gallery/*.py; do echo $$script; MPLBACKEND=Agg ../../$(BIN)/python $$script || exit 1; done
	cd docs/_static && for page in ../stories/assay.md ../stories/fleet.md; do echo $$page; \
	  sed -n '/^```python$$/,/^```$$/{/^```/!p}' $$page | MPLBACKEND=Agg ../../$(BIN)/python - || exit 1; done
	$(BIN)/python docs/_ext/retina.py docs/_static/*.png

# what needs a GPU: its tests, then speed beside the CPU; appends to scripts/gpu/records.jsonl, goes on where it was cut
#   make gpu ARGS="--only nuts-64 svi --budget 300"      without CUDA the script says so and ends with 3, make with 2
gpu: $(VENV)/.installed-bench $(VENV)/.installed-dev,tracking ## what needs a CUDA device: tests, and speed beside the CPU; without one it says so and ends with 2
	@$(BIN)/python scripts/gpu/run.py $(ARGS)

# the net and recipe of study 5; without DIR, where torchvision leaves MNIST (DIR/MNIST/raw), on a stand-in
#   make mnist DIR=~/data ARGS="--softmaxes 'two softmaxes' --seeds 0 1"
mnist: $(VENV)/.installed ## SWAG on MNIST in DIR=, or on a stand-in, by the recipe of study 5: ten minutes
	$(BIN)/python scripts/mnist/run.py $(if $(DIR),$(DIR) )$(ARGS)

clean: ## remove what was built and written, not results
	rm -rf build dist docs/_build docs/api docs/checks docs/claims docs/tutorials *.egg-info .pytest_cache .ruff_cache .mypy_cache $(VENV)/.installed*
	find . -name __pycache__ -type d -not -path './$(VENV)*/*' -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'pyrobnn needs Python 3.11 or newer, found' "$$($(PYTHON) -V)" '- use: make PYTHON=/path/to/python3.12 ...'; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(PINS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-%: $(PINS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$*]'
	touch $@ $(VENV)/.installed
