# One launcher for people, hooks and CI. Every target makes the environment that it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# Modules are compiled when they are first imported: compiling all of them takes half of an installation.
INSTALL = -m pip install --no-compile

# A file's tests run in one process, in the order of the files: they share what is compiled.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

NEWEST      = $(shell .ci/newest-python)
NEWEST_VENV = .venv-newest

.PHONY: demo test test-newest test-torch test-torch-gate test-torch-sample check unit format prove corpus experiments fuzz nightly references bench scoreboard docs screenshots gpu-hlo tpu-hlo clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) --quiet --upgrade "pip>=25.1"
	$(BIN)/python $(INSTALL) --quiet --editable '.[train]' --group dev
	@touch $@

$(VENV)/.installed: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -e $(VENV)/.ready || echo "installing JAX, optax and Orbax, 150 MB, into $(VENV)"
	@test -e $(VENV)/.ready || $(BIN)/python $(INSTALL) --progress-bar on --editable '.[train]'
	@touch $@

demo: $(VENV)/.installed  ## train the example by five methods, side by side
	$(BIN)/scalewise compare examples/gpt.py --steps 100 $(ARGS)

test: check unit          ## lint, types, and what protects a user from a change

check: $(VENV)/.ready     ## lint, format, spelling, types
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/ruff format --check .
	$(BIN)/pyright

unit: $(VENV)/.ready      ## the tests; "make nightly" runs those marked slow as well
	$(PYTEST) -m "not slow" $(ARGS)

# What stands on the interpreter, where releases of JAX differ; "make test-newest ARGS=tests" runs all.
ON_THE_INTERPRETER = $(addprefix tests/,interpret audit/test_run.py training/test_step.py \
	$(addprefix autoscale/test_,composition.py coverage.py products.py shard_map.py))

test-newest:              ## tests on the newest Python and JAX at hand, if there is one
	@if [ -n "$(NEWEST)" ]; then \
		$(MAKE) --no-print-directory unit VENV=$(NEWEST_VENV) PYTHON="$(NEWEST)" \
			ARGS="$(or $(ARGS),$(ON_THE_INTERPRETER))"; \
	else \
		echo "test-newest: skipped, no Python 3.12 or newer is at hand (PATH and pyenv were searched)"; \
	fi

test-torch: .venv-torch/.ready  ## tests of scalewise.torch, which need torch and transformers
	PYTHONDONTWRITEBYTECODE= .venv-torch/bin/python -m pytest tests/pytorch $(ARGS)

test-torch-sample: .venv-torch/.ready  ## those that are not marked slow: two minutes
	PYTHONDONTWRITEBYTECODE= .venv-torch/bin/python -m pytest -n 2 --dist worksteal \
		-m "not slow" $(or $(ARGS),tests/pytorch)

# What the gate runs of the sample: errors beside torch's, derivatives, control flow, fixes, recipes.
test-torch-gate:
	$(MAKE) --no-print-directory test-torch-sample \
		ARGS="$(addprefix tests/pytorch/test_,reference.py backward.py gradients.py control.py torch.py edits.py recipes.py)"

.venv-torch/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-torch
	.venv-torch/bin/python $(INSTALL) --quiet --upgrade "pip>=25.1"
	.venv-torch/bin/python $(INSTALL) --quiet --editable '.[train,torch]' --group torch pytest
	.venv-torch/bin/python $(INSTALL) --quiet --no-deps timm==1.0.31  # it needs no torchvision here
	@touch $@

prove: $(VENV)/.ready    ## every cast on all 2^32 inputs, going on where it stopped; and what else is claimed
	$(BIN)/python -m proofs.casts $(ARGS)
	$(BIN)/python -m proofs.arithmetic
	$(BIN)/python -m proofs.converts
	$(BIN)/python -m proofs.norms dominated
	$(BIN)/python -m proofs.halves
	$(BIN)/python -m proofs.probabilities
	$(BIN)/python -m failures score --tool scalewise --set gallery
	$(BIN)/python -m proofs.two_processes
	$(BIN)/python -m proofs.resume
	$(BIN)/python -m proofs.functions
	$(BIN)/python -m proofs.published
	$(BIN)/python -m proofs.matrix_units
	$(BIN)/python -m proofs.walks
	$(PYTEST) -m slow
	OPTIMIZED=1 $(PYTEST) -m "not slow" $(addprefix tests/,audit autocast autoscale cli planning scaled training test_*.py)

corpus: $(VENV)/.ready   ## the audit's totals on other people's failures: docs/corpus.json
	$(BIN)/python -m pip install --quiet --group corpus
	$(BIN)/python -m failures truth --set corpus --set trainings
	$(BIN)/python -m failures score --tool scalewise --record $(ARGS)

fuzz: $(VENV)/.ready     ## random programs, malformed files and wrong arguments, seeded
	$(BIN)/python -m proofs.fuzz $(ARGS)

# Everything that docs/results.md claims; each command runs, also after one has failed. Many hours.
nightly: $(VENV)/.ready  ## every command of docs/results.md, recorded anew
	@failed=""; run() { echo "nightly: $$*"; "$$@" || failed="$$failed\n  $$*"; }; \
	run $(MAKE) demo ARGS="--out runs/nightly-$$(date +%F)"; \
	run $(BIN)/python -m failures score --tool scalewise --set gallery --record --again; \
	run $(MAKE) corpus; \
	run $(MAKE) scoreboard; \
	run $(MAKE) screenshots; \
	run $(MAKE) prove; \
	run $(MAKE) references; \
	run $(BIN)/python docs/functions_page.py measure; \
	run $(BIN)/python -m proofs.norms; \
	run $(BIN)/python -m proofs.normalise; \
	run $(BIN)/python -m proofs.scaling_kinds; \
	run $(BIN)/python -m proofs.resume; \
	run $(BIN)/python -m proofs.two_processes; \
	run $(BIN)/python -m proofs.fuzz programs; \
	run $(BIN)/python -m proofs.wheels --torch; \
	run $(BIN)/python -m proofs.first_minutes; \
	run $(BIN)/python -m proofs.checkpoints.mutants; \
	run $(MAKE) gpu-hlo; \
	run env PYTHONPATH=$(GPU_PLUGIN) $(BIN)/python -m benchmarks.grouped; \
	run $(MAKE) bench; \
	run $(BIN)/python -m benchmarks.training; \
	run $(BIN)/python -m benchmarks.autoscale; \
	run $(BIN)/python -m benchmarks.audit; \
	run $(BIN)/python -m benchmarks.monitor; \
	run $(BIN)/python -m benchmarks.messages; \
	for page in gallery scoreboard functions norms scalify results; do \
		run env PYTHONPATH=. $(BIN)/python docs/$${page}_page.py; \
	done; \
	if [ -n "$$failed" ]; then printf "nightly: failed:$$failed\n"; exit 1; fi; echo "nightly: all passed"

experiments: $(VENV)/.ready  ## models beside float32, tortured, planned; methods and recipes side by side: docs/
	$(BIN)/python -m experiments.parity $(ARGS)
	$(BIN)/python -m experiments.torture
	PYTHONPATH=. $(BIN)/python docs/parity_page.py
	$(BIN)/python -m experiments.side_by_side
	PYTHONPATH=. $(BIN)/python docs/side_by_side_page.py
	$(BIN)/python -m experiments.recipe_numbers
	$(BIN)/python -m experiments.recipe_training
	$(BIN)/python -m experiments.operand_bias
	$(BIN)/python -m experiments.optimizers
	$(BIN)/python -m experiments.frameworks
	$(BIN)/python -m experiments.attention
	$(BIN)/python -m experiments.cache_formats
	PYTHONPATH=. $(BIN)/python docs/recipe_results_page.py
	$(BIN)/python -m experiments.plan --models gpt moe resnet --out docs/plan.jsonl

scoreboard: $(VENV)/.ready .venv-scoreboard/.ready  ## the gallery through other tools: docs/scoreboard.md
	for tool in debug_nans debug_infs checkify debug_nans_op_by_op debug_infs_op_by_op; do \
		$(BIN)/python -m failures score --tool $$tool --set gallery --record $(ARGS) || exit 1; \
	done
	for tool in detect_anomaly debug_underflow_overflow tensor_checker scalewise; do \
		.venv-scoreboard/bin/python -m failures score --tool $$tool --set steps --set torch --set paddle \
			--record $(ARGS) || exit 1; \
	done
	PYTHONPATH=. $(BIN)/python docs/scoreboard_page.py

.venv-scoreboard/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-scoreboard
	.venv-scoreboard/bin/python $(INSTALL) --quiet --upgrade "pip>=25.1"
	.venv-scoreboard/bin/python $(INSTALL) --quiet --editable '.[train]' --group scoreboard
	@touch $@

docs: .venv-docs/.ready   ## the site, in site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict $(ARGS)

.venv-docs/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python $(INSTALL) --quiet --upgrade "pip>=25.1"
	.venv-docs/bin/python $(INSTALL) --quiet --editable '.[train]' --group docs
	@touch $@

screenshots: $(VENV)/.ready docs  ## pictures of the pages for docs/screenshots.md; needs Chromium
	$(BIN)/python $(INSTALL) --quiet --group screenshots
	$(BIN)/python docs/screenshots.py

references: $(VENV)/.ready  ## where other libraries' casts agree with ours, and where not
	$(BIN)/python $(INSTALL) --quiet --group prove
	$(BIN)/python -m proofs.references

# Memory is used again, by everybody: how fast pages come isn't what is measured.
MALLOC = glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=8589934592
bench: .venv-bench/.ready ## casts beside np.copyto and the other libraries
	GLIBC_TUNABLES=$(MALLOC) .venv-bench/bin/python -m benchmarks.casts $(ARGS)

.venv-bench/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python $(INSTALL) --quiet --upgrade "pip>=25.1"
	.venv-bench/bin/python $(INSTALL) --quiet --editable '.[train]' --group bench
	@touch $@

# The CUDA compiler is in the wheels of JAX's CUDA plugin (182 MB); nothing else of CUDA is needed.
GPU_PLUGIN = .gpu-plugin
gpu-hlo: $(GPU_PLUGIN)/.ready  ## what training steps compile to for an H100, checked; no GPU needed
	PYTHONPATH=$(GPU_PLUGIN) $(BIN)/python -m benchmarks.gpu_hlo $(or $(ARGS),--check)

$(GPU_PLUGIN)/.ready: $(VENV)/.ready
	V=$$($(BIN)/python -c "import jax; print(jax.__version__)") && \
		$(BIN)/python $(INSTALL) --quiet --upgrade --no-deps --target=$(GPU_PLUGIN) \
			jax-cuda12-plugin==$$V jax-cuda12-pjrt==$$V
	@touch $@

tpu-hlo: .venv-tpu/.ready  ## XLA's estimated cycles of one program on a TPU; no TPU needed
	.venv-tpu/bin/python -m benchmarks.tpu_hlo $(ARGS)

.venv-tpu/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-tpu
	.venv-tpu/bin/python $(INSTALL) --quiet --upgrade "pip>=25.1"
	.venv-tpu/bin/python $(INSTALL) --quiet --editable '.[train]' --group tpu
	@touch $@

format: $(VENV)/.ready    ## mend what lint and format can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .compiled site $(VENV) $(NEWEST_VENV) .venv-bench .venv-docs .venv-scoreboard .venv-torch .venv-tpu $(GPU_PLUGIN)
