# `make demo` and `make test` are all a newcomer needs; both create .venv and install what they use.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
CONSTRAINTS ?= constraints.txt
PIP := $(PY) -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS)
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto --maxprocesses 8 --dist loadfile

.PHONY: help demo test test-hosts test-typed mutants compile-kernels check check-all test-gpu fuzz types lint notebooks docs pages dist bench clean

help:
	@echo "make demo       install, train two nano models on a CPU, compare, decompose one, write an HTML page (minutes)"
	@echo "make test       install the test tools, run the whole suite (minutes)"
	@echo "make test-hosts the numerically sensitive tests, rounded as other CPUs would (up to 25 minutes)"
	@echo "make test-typed most tests once more, every annotated shape and type checked at run time"
	@echo "make mutants    change the code in small ways and list what no test notices (15 minutes, the first time 30); MUTANTS=--read"
	@echo "make test-gpu   the tests that need a CUDA device"
	@echo "make check      lint, format, types and the forms of .github"
	@echo "make notebooks  execute the notebooks on tiny models"
	@echo "make docs       build site/ from the docstrings, docs/ and notebooks, offline"
	@echo "make pages      make docs, then every page in a headless browser, light and dark"
	@echo "make dist       build wheel and sdist, check them, try the wheel in a fresh environment"
	@echo "make bench      the CPU benchmarks (tens of minutes)"
	@echo "make compile-kernels  the Triton kernels ahead of time, without a GPU; KERNELS=--all for every target"
	@echo "make fuzz       2,000 random configs, checkpoint folders, sampling arguments and command lines each"
	@echo "make check-all  check, test, test-typed, notebooks, pages, the slow tests, every kernel target"
	@echo "make clean      remove the environment and what was built, trained and demonstrated (runs/, demo/)"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip

$(VENV)/.base: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing tnlm into $(VENV) (torch and its companions: a few minutes the first time)"
	$(PIP) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP) -e ".[test]"
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) -e ".[dev]"
	@touch $@

demo: $(VENV)/.base
	$(VENV)/bin/tnlm demo

test: $(VENV)/.test
	$(PYTEST) tests
	$(PYTEST) --dist load tests/kernels/interpreter  # its own process: the interpreter must be on before Triton decorates a kernel

# what runs in processes of its own is not checked there; the table of symmetries calls what other tests call
UNTYPED := kernels interp/test_symmetries.py interp/tokens/test_study_copying.py \
	$(addprefix training/run/test_distributed,.py _failures.py) \
	$(addsuffix .py,$(addprefix test_,blocks first_steps import mutants notebooks packaging pages))
test-typed: $(VENV)/.test  # once more, every annotated shape and type checked at run time
	$(PYTEST) --jaxtyping-packages=tnlm,beartype.beartype -m "not user_error and not slow and not gpu and not network" \
		$(addprefix --ignore=tests/,$(UNTYPED)) tests

test-hosts: $(VENV)/.test  # what may round differently, as other CPUs would; HOSTS=--quick for two of them
	$(PY) scripts/imitate_hosts.py $(HOSTS)

mutants: $(VENV)/.dev  # a sample; survivors are information, not a failure; MUTANTS='--seed 1 --sample 20' chooses another
	$(PY) scripts/mutants $(MUTANTS)

compile-kernels: $(VENV)/.test  # ahead of time, without a GPU
	$(PY) -m tnlm.kernels.triton_compile $(KERNELS)

lint: $(VENV)/.dev  # the forms of .github against the schemas that check-jsonschema carries: no network
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yml

types: $(VENV)/.dev
	$(VENV)/bin/mypy

check: lint types

test-gpu: $(VENV)/.test
	$(PY) -m pytest -q -m gpu tests

notebooks: $(VENV)/.dev
	TNLM_NOTEBOOK_TINY=1 PLOTLY_RENDERER=plotly_mimetype OMP_NUM_THREADS=1 $(PY) -m pytest -q --nbmake --nbmake-timeout=600 -n 2 notebooks

docs: $(VENV)/.dev
	rm -rf site
	$(PY) -m sphinx -q -W --keep-going -c docs -d build/doctrees . site

pages: docs  # every page of site/ in a headless browser, light and dark; says so when there is none
	$(PY) scripts/check_pages.py site

dist: $(VENV)/.dev  # wheel and sdist, checked, and the wheel tried in a fresh environment outside of the checkout
	rm -rf dist
	$(PY) -m build
	$(VENV)/bin/twine check --strict dist/*
	$(PY) scripts/check_wheel.py dist $(if $(TAG),--tag $(TAG))

bench: $(VENV)/.test
	for b in attention loading interp train_step; do OMP_NUM_THREADS=1 $(PY) benchmarks/$$b.py || exit 1; done

fuzz: $(VENV)/.test  # about 40 minutes
	TNLM_FUZZ_CASES=2000 $(PYTEST) tests/test_fuzz.py

check-all: check test test-typed notebooks pages
	$(PYTEST) -m "slow and not gpu and not network" tests
	$(MAKE) compile-kernels KERNELS=--all

clean:
	rm -rf $(VENV) build dist *.egg-info site runs demo
