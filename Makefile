# Every command a contributor needs. Each makes the virtual environment it runs in, if it is not there yet.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SHELL := /bin/bash

.PHONY: help install demo test compat device check lint wheel release browser docs migration libraries faults bench growth clean .long .faults .ranks .lost

help:  ## this text
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

install: $(VENV)/.installed  ## a virtual environment with Chainring and what its tests need

# What the examples need, and nothing else: a minute less for those who only try them, who see what is downloaded.
$(VENV)/.examples: pyproject.toml constraints.txt
	@echo "installing PyTorch and what the examples need into $(VENV): 1.2 GB, a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(subst --quiet,,$(PIP)) --editable ".[examples]"
	touch $@

$(VENV)/.installed: $(VENV)/.examples
	$(PIP) --upgrade "pip>=25.1"  # the first that knows dependency groups
	$(PIP) --group dev
	touch $@

demo: $(VENV)/.examples  ## train on handwritten digits, be killed, continue, and compare the bits; results in result/
	$(BIN)/python examples/demo/demo.py

# Tests that build the pages, start hundreds of processes or make thousands of requests, those of the longest files first.
LONG := $(addprefix tests/test_,black_box_page.py docs.py) tests/examples \
	$(addprefix tests/remote/test_,replays_on_addresses.py bucket_faults.py bucket_credentials.py) \
	$(addprefix tests/parallel/test_,late_ranks.py survival.py balance.py audit.py parts_on_a_mesh.py virtual_ranks_of_sharded_models.py memory_on_ranks.py) \
	$(addprefix tests/training/updaters/test_,compiled_update.py virtual_memory.py) $(addprefix tests/training/extensions/test_,virtual_evaluation.py rank_times.py) \
	$(addprefix tests/testing/test_,verify_resume.py verify_resume_verdicts.py replay.py) \
	$(addprefix tests/cli/test_,replay_commands.py commanded_runs.py reproduce_command.py verify_resume_command.py diff_script.py) \
	$(addprefix tests/test_,first_computation.py wrong_programs.py distributed_examples.py notebook.py portability.py terminal.py) \
	$(addprefix tests/serializers/test_,hostile_checkpoints.py hostile.py foreign_on_ranks.py) \
	$(addprefix tests/training/test_,control.py everything_resumes.py hostile_out.py nothing_left.py) $(addprefix tests/parallel/test_,agreement.py conveniences_on_ranks.py recorder_on_ranks.py sharded_layouts.py diff_of_ranks.py moves.py launchers.py) \
	tests/writers/test_comet.py $(addprefix tests/remote/test_,survival_in_stores.py index.py saving_to_addresses.py cli_on_addresses.py commands_on_addresses.py)

TESTS := --numprocesses 3 --dist loadfile --ignore tests/migration --ignore tests/libraries $(addprefix --ignore ,$(LONG))

# Thousands of tests, also of a device, write a run each and remove it: in memory, where 2 GB are free. The rest of CI writes to the disk.
IN_MEMORY := $(shell free=$$(df --output=avail -k /dev/shm 2>/dev/null | tail -n 1); \
	if [[ -w /dev/shm && $${free:-0} -gt 2000000 ]]; then echo /dev/shm; fi)

# A thread that waits for the other gives its core to another process: on two busy cores it would take three times the time.
test check: export OMP_WAIT_POLICY := passive

# Otherwise each process that compiles an update builds or loads three programs, to see whether its compiler knows the processor.
check: export TORCHINDUCTOR_VEC_ISA_OK := 1

test: install  ## the tests a contributor runs
	PYTEST_DEBUG_TEMPROOT=$(IN_MEMORY) $(BIN)/python -m pytest --override-ini tmp_path_retention_policy=failed $(TESTS)

# Where the environments are, and which: make compat ENVIRONMENTS=/tmp/compat TORCH="2.6 newest".
ENVIRONMENTS ?= build/compat
TORCH ?= 2.6 2.9 newest

compat:  ## those tests with PyTorch 2.6, 2.9 and the newest, in environments of their own (20 GB), and their table
	$(PYTHON) tests/compat/run.py $(ENVIRONMENTS) --torch $(TORCH) -- $(TESTS)

# What a device can change: the longest first. tests/device/README.md says what runs on the CPU alone, and why.
ON_DEVICE := --dist loadfile tests/device tests/gpu tests/test_resume.py \
	tests/training $(addprefix tests/reporting/test_,media.py reported_together.py reporter.py) \
	$(addprefix tests/serializers/test_,checkpoint.py filling.py npz.py own_state.py safetensors.py values.py) \
	$(addprefix tests/serializers/test_,optimizers_on_disk.py tensors_on_disk.py) \
	$(addprefix tests/serializers/test_foreign_,accelerate.py distributed.py hugging_face.py lightning.py torch_save.py) \
	$(addprefix tests/iterators/test_,multiprocess_iterator.py own_iterators.py) \
	--ignore tests/training/triggers \
	$(addprefix --ignore tests/training/updaters/test_,compiled_update.py updater_base.py virtual_memory.py) \
	$(addprefix --ignore tests/training/extensions/test_,best_value_extensions.py log_on_resume.py log_report.py) \
	$(addprefix --ignore tests/training/extensions/test_,lr_scheduler_resume.py micro_average.py) \
	$(addprefix --ignore tests/training/extensions/test_,plot_report.py print_report.py progress_bar.py rank_times.py) \
	$(addprefix --ignore tests/training/extensions/test_,running_average.py shifts.py shifts_resume.py virtual_evaluation.py) \
	$(addprefix --ignore tests/training/extensions/test_snapshot_,keep_best.py names.py nan.py order.py sharing.py) \
	$(addprefix --ignore tests/training/test_,advice.py compiled_recipe.py control.py device_auto.py explain.py extension.py) \
	$(addprefix --ignore tests/training/test_,extension_settings.py extensions_of_one_class.py hostile_out.py ledger.py) \
	$(addprefix --ignore tests/training/test_,lost_display.py nothing_left.py out.py out_abandoned.py provenance.py) \
	$(addprefix --ignore tests/training/test_,refusals.py signals.py trainer_lifecycle.py trainer_loop.py watched_keys.py)

device: install  ## tests on an accelerator that is not there, which is compiled first; needs g++
	PYTEST_DEBUG_TEMPROOT=$(IN_MEMORY) $(BIN)/python tests/device/run.py --override-ini tmp_path_retention_policy=failed \
	  --numprocesses 2 $(ON_DEVICE)
	$(BIN)/python tests/device/run.py --device standin tests/device/test_stand_in.py

gpu: install  ## the same tests on an NVIDIA GPU, with a build of PyTorch for it in the environment
	PYTHONPATH=tests/device $(BIN)/python -m pytest -p on_device --device cuda --numprocesses 8 $(ON_DEVICE)

check: install  ## what CI runs besides the tests: style, types, packages, pages, examples, migration, libraries, a device, faults, ranks, speed
	$(MAKE) --jobs 2 --output-sync=target $(VENV)/.chainer lint  # of which one downloads
# The longest first, and what waits for ranks and services beside what computes.
	$(MAKE) --jobs 3 --output-sync=target .long device .lost .ranks .faults libraries browser wheel migration
	$(BIN)/python tests/distributed/run.py --only $(TIMED)  # with nothing beside them, as the next
	$(BIN)/python benchmarks/gate.py

.long: $(VENV)/.chainer
	$(BIN)/python -m pytest --dist loadfile --numprocesses 3 --no-loadscope-reorder $(LONG)  # a third, since most of them wait

.faults: $(VENV)/.libraries  # of whose optimizers random programs are made
	$(VENV)/libraries/bin/python tests/faults/run.py

.lost: install  # forty tries, whose ranks wait for those that are lost: one half beside the other
	$(BIN)/python tests/distributed/run.py --only lost --share 0 2 & \
	  $(BIN)/python tests/distributed/run.py --only lost --share 1 2; ended=$$?; wait $$! && exit $$ended

# What compares the speeds of ranks.
TIMED := named unequal

.ranks: install
	$(BIN)/python tests/distributed/run.py --but lost $(TIMED)

faults: $(VENV)/.libraries  ## kills, signals, damage, random programs, lost ranks, in large numbers
	$(VENV)/libraries/bin/python tests/faults/run.py --large
	$(BIN)/python tests/distributed/run.py --large

lint: install  ## style, types and workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/zizmor --offline --quiet .github

wheel: install  ## build the wheel, install it elsewhere, and run the demo there
	PYTHON=$(BIN)/python .ci/check_wheel

TAG ?= v$(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' src/chainring/_version.py)

release: wheel  ## say whether this commit may be released, and how; nothing is tagged, pushed or uploaded
	$(BIN)/python .ci/release $(TAG)

browser: install  ## the page of a run, seen and clicked in Chromium (apt-get install chromium)
	$(BIN)/python -m pytest tests/browser

docs: install  ## build the documents into build/docs, warnings being errors
	$(BIN)/python -m sphinx -q -W -n --keep-going docs build/docs

# Chainer runs on nothing newer than Python 3.11 and NumPy 1.23; with another Python its half of these tests is skipped.
$(VENV)/.chainer: $(VENV)/.installed
	$(PIP) --no-deps pytorch-pfn-extras pytorch-ignite
	$(PIP) keras
	if $(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then \
	  $(BIN)/python -m venv $(VENV)/chainer && \
	  $(VENV)/chainer/bin/python -m pip install --quiet "numpy==1.23.5" "setuptools<60" wheel "matplotlib<3.8" pillow && \
	  $(VENV)/chainer/bin/python -m pip install --quiet --no-build-isolation chainer==7.8.1; fi
	touch $@

migration: $(VENV)/.chainer  ## the lines of the migration pages, beside the real Chainer, pytorch-pfn-extras, Ignite and Keras
	CHAINER_PYTHON=$$(ls $(abspath $(VENV))/chainer/bin/python 2>/dev/null) \
	  $(BIN)/python -m pytest --dist loadfile --numprocesses 2 tests/migration

# Loaders with states of their own, and what they import.
LOADERS := absl-py array_record cloudpickle etils fsspec grain importlib_resources portpicker protobuf zipp \
	lightning-utilities litdata tifffile catalogue mosaicml-streaming python-snappy cramjam Brotli xxhash zstd \
	attrs bracex braceexpand click deprecation ebmlite av filetype jsonschema jsonschema-specifications lark megatron-energon \
	mfusepy multi-storage-client opentelemetry-api python-dateutil rapidyaml referencing rpds-py s3fs soundfile tzlocal \
	wcmatch webdataset xattr

# Some of these would bring another torch, and others change what transformers finds: without what they depend on, and apart.
$(VENV)/.libraries: $(VENV)/.installed constraints.txt
	$(BIN)/python -m venv $(VENV)/libraries
	echo 'import site; site.addsitedir("'$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')'")' \
	  > $$($(VENV)/libraries/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/installed.pth
	$(PIP:$(BIN)/python=$(VENV)/libraries/bin/python) --no-deps \
	  bitsandbytes pandas peft pytorch_optimizer schedulefree timm torch_geometric torchao torchvision \
	  $(LOADERS)
	touch $@

# In one process: all that is imported takes longer than the tests.
LIBRARIES = $(VENV)/libraries/bin/python -m pytest tests/libraries

libraries: $(VENV)/.libraries  ## optimizers, models and data of bitsandbytes, torchao, timm, peft and others, the real ones
	$(LIBRARIES)

$(VENV)/.bench: $(VENV)/.installed
	$(PIP) --group bench
	touch $@

bench: $(VENV)/.bench  ## an iteration, an epoch, data, snapshots, the start, recovery, growth and ranks, beside other libraries
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/epochs.py
	$(BIN)/python benchmarks/data.py
	$(BIN)/python benchmarks/snapshot.py
	$(BIN)/python benchmarks/object_stores.py
	$(BIN)/python benchmarks/start.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/growth.py --rounds 3
	$(BIN)/python benchmarks/virtual_ranks.py
	$(BIN)/python benchmarks/sharded_load.py
	$(BIN)/python benchmarks/accelerator.py

growth: $(VENV)/.bench  ## measure how the costs grow, in twelve minutes, and draw the curves of docs/speed.md
	$(BIN)/python benchmarks/growth.py --rounds 3 --json docs/pictures/growth.json
	$(BIN)/python docs/pictures/growth.py

clean:  ## remove what the commands here have made
	rm -rf $(VENV) result build dist
