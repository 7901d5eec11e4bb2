# make demo · test · lab · reproduce · bench · bench-gpu · readme · docs · clean
# Each target first brings .venv up to date with pyproject.toml and constraints.txt.
#   PYTHON=python3.12            another interpreter than the newest suitable one
#   TORCH_INDEX=<address>        another build of torch (README: "Which build of torch")

BIN  := .venv/bin
OLD  := import sys; sys.exit(sys.version_info < (3, 11))
VENV := import ensurepip, venv
PYTHON ?= $(shell for need in '$(VENV);' ''; do for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c "$$need $(OLD)" >/dev/null 2>&1 && echo $$p && exit; done; done; echo python3)

.PHONY: demo test lab reproduce bench bench-gpu readme docs clean

demo: .venv/.ready
	$(BIN)/soma demo

# Notebooks first, as lessons; then the laws that cross them. One thread each, asleep while it waits: processes that spin on the same cores crawl.
test: export OMP_NUM_THREADS = 1
test: export MKL_NUM_THREADS = 1
test: export OPENBLAS_NUM_THREADS = 1
test: export OMP_WAIT_POLICY = PASSIVE
test: .venv/.ready
	$(call limit,600,$(BIN)/nbdev_test --n_workers 2 --do_print --timing)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" --durations=10

lab: .venv/.ready
	$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/nbs/index.ipynb

# Figures and tables of the paper at the scale of two cores; what is made already is not run again.
reproduce: .venv/.ready
	$(BIN)/soma reproduce all --preset small

# How fast the perturbed forward is here, beside what one would write instead: minutes, and nothing else should run.
bench: .venv/.ready
	$(BIN)/soma bench

# The same for the GPU that is there: at most six minutes.
bench-gpu: .venv/.ready
	$(BIN)/soma bench --device cuda

readme: .venv/.ready
	$(BIN)/python -c "from soma.report import write_readme; write_readme('.')"

docs: .venv/.ready
	@command -v quarto >/dev/null || { echo "soma: quarto is missing: the site is built with it; install it, then make docs again" >&2; exit 1; }
	$(MAKE) readme
	$(BIN)/nbdev_docs

# Only what is made again in seconds: .venv and runs/ stay.
clean:
	rm -rf build dist _docs _proc nbs/nbdev.yml *.egg-info .pytest_cache figures/smoke
	find nbs soma tests -name __pycache__ -prune -exec rm -rf {} + -o -name .ipynb_checkpoints -prune -exec rm -rf {} +

# A stamp: newer than both files, and written only after pip has succeeded.
.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c "$(OLD)" 2>/dev/null || { echo "soma: python3.11 or newer is missing (or set PYTHON=...)" >&2; exit 1; }
	@$(PYTHON) -c "$(VENV)" 2>/dev/null || { echo "soma: python3-venv is missing for $(PYTHON) (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@command -v g++ >/dev/null || { echo "soma: g++ is missing (Debian, Ubuntu: apt install g++)" >&2; exit 1; }
	@rm -f $@
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install --no-deps --index-url $(TORCH_INDEX) -c constraints.txt torch)
	$(BIN)/python -m pip install -e '.[dev]' -c constraints.txt
	@touch $@

# $(call limit,SECONDS,COMMAND): ends COMMAND and all it started after SECONDS, or at Ctrl-C; COMMAND hears Ctrl-C as usual itself.
define limit
@echo "$(2)"; trap 'kill $$pid; wait $$pid; exit 130' INT TERM; timeout $(1) env --default-signal=INT $(2) & pid=$$!; wait $$pid; code=$$?; \
	[ $$code -ne 124 ] || echo "soma: over the time limit of $(1) s; the notebooks that started above without completing are the slow ones" >&2; exit $$code
endef
