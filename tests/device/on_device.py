"""A plugin of pytest: tests on a GPU or on the stand-in for one, on which a race is a failure of each test.

A test of tests/device, of tests/gpu, or one that asks for the fixture ``device`` says itself what is there. Most others were
written for the CPU, and are run with updaters and evaluators whose device is that one unless they say which. Where such a
test hands tensors of its own to a model, or compares them with what it has trained, it mixes devices and is skipped; where
the library mixes them, it fails; so does one that asks for the fixture. One that starts ranks on the CPU is skipped where
it does. What else depends on the CPU is listed below.
"""

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from chainring.training.extensions import Evaluator
from chainring.training.updaters import StandardUpdater

TESTS = Path(__file__).parents[1]
IS_STAND_IN = "CHAINRING_STAND_IN" in os.environ
LEFT_OUT = {
    "a weight that a device has computed is not read, as a warning says": (
        "test_a_micro_batch_of_weight_0_whose_loss_is_nan_adds_nothing",
        "test_a_scheduled_rate_goes_on_in_an_update_of_weight_0",
        "test_an_optimizer_with_a_closure_is_left_as_it_is_by_an_update_of_weight_0",
        "test_an_update_of_weight_0_changes_no_parameter_and_no_optimizer",
        "test_the_log_has_the_mean_of_what_counts",
        "test_two_ranks_leave_out_an_update_of_weight_0_and_a_share_of_it",
    ),
    "it compares with what is computed on the host": (
        "test_a_gan_in_parts_is_one_batch_as_large",  # the numbers of several small draws there are not those of a large one
        "test_a_killed_run_has_its_newest_snapshot_and_continues_byte_for_byte",
        "test_each_call_of_a_closure_draws_its_own_random_numbers",
        "test_lazy_layers_get_one_initialization",
        "test_lazy_models_that_are_given_and_a_resume_into_lazy_layers",
        "test_the_step_is_left_out_as_in_a_loop_written_by_hand",
    ),
    "its model or its metric stays on the host": (
        "test_a_lazy_module_is_refused_until_it_has_seen_a_batch",
        "test_a_metric_outside_of_the_model_that_has_counted_a_repeated_example_is_refused",
        "test_a_saved_metric_resumes_at_every_iteration",
        "test_after_an_evaluation_the_model_has_its_own_metric",
        "test_an_environment_resumes_at_every_step_of_an_episode",
        "test_between_updates_it_changes_no_bit_of_a_run",
        "test_every_submodule_gets_its_training_flag_back",
        "test_it_refuses_what_has_no_rows_in_order[model0",
        "test_metrics_count_no_example_that_a_rank_repeats",
        "test_metrics_in_training_count_no_example_that_a_rank_repeats",
        "test_models_and_devices_may_both_be_given",
        "test_models_may_be_given_without_devices",
        "test_the_classifier_s_accuracy_is_that_of_all_examples",
        "test_the_converter_gets_the_batch_and_the_device[None]",
    ),
    "it is about the memory and the processor of the host": (
        "test_a_part_resumes_after_every_iteration[chainring.training.extensions.RankTimes]",
        "test_a_part_resumes_after_every_iteration[chainring.training.extensions.SystemMetrics]",
        "test_a_part_resumes_after_every_iteration[chainring.training.extensions.Throughput]",
        "test_all_parts_together_resume",
        "test_keys_begin_with_the_name",
        "test_shares_are_those_of_the_time_since_the_last_report",
        "test_the_peak_of_memory_never_sinks",
        "test_third_error_ends_the_run_with_the_numbers_and_the_settings",
        "test_what_cannot_be_repeated_ends_the_run_with_the_numbers_and_the_settings[evaluation]",
        "test_what_cannot_be_repeated_ends_the_run_with_the_numbers_and_the_settings[snapshot]",
        "test_what_cannot_be_repeated_ends_the_run_with_the_numbers_and_the_settings[step]",
        "test_what_would_have_other_bits_is_refused_by_name[a batch that is changed in place]",
    ),
    "on a device it goes by events, and by the order of computations there": (
        "test_a_kernel_that_is_not_deterministic_is_told_from_a_fault",
        "test_goodput_is_the_part_of_the_time_that_went_into_updates",
        "test_updates_that_a_kill_has_undone_and_the_time_until_the_next_start_are_lost",
        "test_updates_that_a_rollback_has_undone_are_lost",
    ),
    "what it changes is a copy of the batch on the device": (
        "test_what_a_forward_changes_without_a_count_of_it_is_refused_where_memory_runs_out[the data of the batch",
        "test_what_a_forward_changes_without_a_count_of_it_is_refused_where_memory_runs_out[what has a gradient in",
    ),
    "torch has no kernel in deterministic mode, which is that of accelerators": (
        "test_any_reader_of_safetensors_opens_the_file[torch.float4_e2m1fn_x2]",
        "test_every_dtype_and_shape_comes_back_to_the_bit[(2, 3, 4, 5)-torch.float4_e2m1fn_x2]",
    ),
    "torch's optimizers do not take that on an accelerator": ("test_a_number_in_place_of_a_tensor_is_a_number",),
    "its part of a run is on the host": (
        "test_a_part_resumes_after_every_iteration[chainring.datasets.",
        "test_a_part_resumes_after_every_iteration[chainring.iterators.",
        "test_a_part_resumes_after_every_iteration[chainring.training.triggers.",
    ),
    "it makes a device of its own": ("test_iterations_run_on_a_device_that_has_no_numbers",),
    "it trains in a forked process": ("test_a_process_in_which_a_run_has_ended_ends",),
    "what it expects is that no accelerator is there": ("test_a_start_says_when_where_and_from_which_iteration",),
}
"""Tests that depend on the CPU, by what of it."""
LEFT_OUT_ON_STAND_IN = {
    "the peak of the stand-in is not known, which is said": (
        "test_a_compiled_model_is_counted_on_a_copy_without_data",
        "test_a_gradient_of_a_gradient_counts",
        "test_a_model_that_runs_without_gradients_counts_its_forward",
        "test_an_update_core_of_your_own_counts_what_it_computes",
        "test_counting_changes_no_bit",
        "test_micro_batches_and_virtual_ranks_add_up",
        "test_operations_follow_the_examples_of_batches_that_differ",
        "test_the_operations_of_a_model_are_those_that_a_hand_counts",
        "test_what_an_audit_computes_again_does_not_count",
        "test_what_gradient_checkpointing_computes_again_does_not_count",
        "test_without_a_known_peak_there_is_no_part_of_it",
    ),
    "the stand-in has no sparse tensors": (
        "test_every_optimizer_goes_on_from_the_disk_bit_for_bit[SparseAdam",
        "test_every_optimizer_of_torch_goes_on_bit_for_bit[SparseAdam]",
        "test_sparse_gradients_stay_sparse_in_one_process",
    ),
    "the stand-in has no fused recurrent cells": (
        "test_a_recurrent_layer_that_moves_computes_with_the_parameters_of_the_optimizer",
    ),
}
"""Tests of what the stand-in does not have."""
LEFT_OUT_ON_GPU = {
    "the host adds up in another order, and it compares with the host": (
        "test_a_recurrent_layer_that_moves_computes_with_the_parameters_of_the_optimizer",
        "test_a_run_killed_at_any_iteration_continues_from_the_disk[8-",  # the run ends by its losses, a little earlier
        "test_a_step_by_closure_is_not_compiled_and_says_so",
        "test_an_update_is_that_of_the_plain_loop",
        "test_average_that_every_virtual_rank_updates_is_updated_once",
        "test_the_continued_run_follows_",
        "test_the_default_update_with_lbfgs_is_the_loop_by_hand",
        "test_the_program_covers_what_it_is_for",
        "test_two_optimizers_of_which_one_needs_a_closure_step_one_after_the_other",
        "test_what_an_optimizer_has_for_",
    ),
    "it computes with tensors of the host": (
        "test_a_model_that_runs_without_gradients_counts_its_forward",
        "test_what_gradient_checkpointing_computes_again_does_not_count",
    ),
    "the peak of the device may be known": (
        "test_a_compiled_model_is_counted_on_a_copy_without_data",
        "test_without_a_known_peak_there_is_no_part_of_it",
    ),
    "a trace has what the device does, too": ("test_the_trace_has_the_operations_of_its_iterations",),
    "the driver opens files": ("test_it_serves_a_trainer_with_an_evaluator_and_snapshots",),
    "torch has no such kernel for CUDA": ("test_every_optimizer_goes_on_from_the_disk_bit_for_bit[Adagrad-fused]",),
}
"""Tests that need the arithmetic of the host."""
MIXED = ("Expected all tensors to be on the same device", "can't convert cuda:0 device type tensor to numpy")


def is_for_devices(path: Path) -> bool:
    return path.parts[len(TESTS.parts)] in ("device", "gpu")


def patch(patched: pytest.MonkeyPatch, name: str) -> None:
    import rank_pair  # found when pytest has read where to look

    started = rank_pair.in_environments

    def in_environments(*given: Any, device: Any = "cpu", **named: Any) -> list[Any]:
        if device == "cpu":
            pytest.skip("its ranks are on the CPU")
        return started(*given, device=device, **named)

    patched.setattr(rank_pair, "in_environments", in_environments)
    for kind in (StandardUpdater, Evaluator):

        def init(self: Any, *given: Any, _init: Any = kind.__init__, device: Any = None, **named: Any) -> None:
            _init(self, *given, device=name if device is None else device, **named)

        patched.setattr(kind, "__init__", functools.wraps(kind.__init__)(init))
    close, equal = torch.testing.assert_close, torch.equal
    patched.setattr(torch.testing, "assert_close", functools.partial(close, check_device=False))

    def equal_in_a_test(one: Any, other: Any) -> bool:
        is_of_test = Path(sys._getframe(1).f_code.co_filename).is_relative_to(TESTS)
        return equal(one.cpu(), other.cpu()) if is_of_test else equal(one, other)

    patched.setattr(torch, "equal", equal_in_a_test)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    left_out = LEFT_OUT | (LEFT_OUT_ON_STAND_IN if IS_STAND_IN else LEFT_OUT_ON_GPU)
    for item in items:
        for reason, names in left_out.items():
            if item.name.startswith(names) and not is_for_devices(item.path):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="module")
def _on_device(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        if not is_for_devices(request.path):
            patch(patched, request.config.getoption("device"))
        yield


@pytest.fixture(autouse=True)
def _no_races() -> Iterator[None]:
    if not IS_STAND_IN:
        yield
        return
    import stand_in

    stand_in.native.take_races()
    yield
    races = stand_in.native.take_races()
    stand_in.native.reset()
    assert not races, "\n".join(races)


def mixes_by_itself(error: BaseException) -> bool:
    """True if the innermost line that is not PyTorch's is one of a test."""
    while error.__cause__ is not None:
        error = error.__cause__
    files, step = [], error.__traceback__
    while step is not None:
        files.append(step.tb_frame.f_code.co_filename)
        step = step.tb_next
    inner = next((file for file in reversed(files) if "/torch/" not in file), "")
    return any(text in str(error) for text in MIXED) and Path(inner).is_relative_to(TESTS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    asks = is_for_devices(item.path) or "device" in item._fixtureinfo.initialnames
    if report.failed and not asks and call.excinfo is not None and mixes_by_itself(call.excinfo.value):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, "its own tensors are on the CPU")
    return report
