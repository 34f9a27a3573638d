"""Tests of what an older torch, which Chainring runs on too, does not have: by what their names say, with the reason."""

import re

import pytest
import torch

VERSION = tuple(map(int, re.match(r"(\d+)\.(\d+)", torch.__version__).groups()))

FSDP_ON_CPU = "fully_shard computes on the CPU"
COMPILED = "torch compiles a whole update"
TENSOR_RATES = "schedulers keep apart learning rates that are tensors"
LACKING = [
    ((2, 7), FSDP_ON_CPU, r"tests/parallel/.*([Ss]hard|fsdp|layouts)"),
    ((2, 7), FSDP_ON_CPU, r"test_exponential_moving_average\.py::test_a_sharded_model"),
    ((2, 7), FSDP_ON_CPU, r"test_exponential_moving_average\.py::test_an_average_whose_shards"),
    ((2, 7), FSDP_ON_CPU, r"test_agreement\.py::(test_a_setting_that_differs|test_stages_of_a_pipeline)"),
    ((2, 7), FSDP_ON_CPU, r"test_closures\.py::test_lbfgs_over_sharded_parameters"),
    ((2, 7), FSDP_ON_CPU, r"test_virtual_evaluation\.py::test_two_ranks_find"),
    ((2, 7), FSDP_ON_CPU, r"test_mesh\.py.*True"),
    ((2, 7), FSDP_ON_CPU, r"test_model_ranks\.py.*(shape1|of_one_model_that_differ)"),
    ((2, 7), FSDP_ON_CPU, r"test_mesh\.py::test_a_layout_that_is_not_understood"),
    ((2, 7), "the group of a rank that has failed can be left", r"test_lost_ranks\.py.*what_others_never_begin"),
    ((2, 7), "the planted bit survives the rounding", r"test_(diff_command|capturing)\.py.*(epsilon|one ulp)"),
    ((2, 7), FSDP_ON_CPU, r"test_recorder_on_ranks\.py::test_every_layout"),
    ((2, 10), TENSOR_RATES, r"test_lr_scheduler_resume\.py.*tensors.*(ReduceLROnPlateau|SequentialLR)"),
    ((2, 10), TENSOR_RATES, r"test_schedulers_on_disk\.py.*is_a_tensor.*(ReduceLROnPlateau|SequentialLR)"),
    ((2, 7), "a file tells Adam's state from AdamW's", r"test_an_optimizer_of_numbers.*Adam and AdamW"),
    ((2, 13), COMPILED, r"test_compiled_update(_on_cuda)?\.py"),
    ((2, 13), COMPILED, r"test_stages\.py.*settings3"),
    ((2, 13), COMPILED, r"::test_a_compiled_update_that_reports_them_runs_uncompiled"),
    ((2, 13), COMPILED, r"::test_an_update_without_data_is_compiled_without_a_warning"),
    ((2, 10), "the state of `SWALR` is made of values", r"test_schedulers_on_disk\.py.*SWALR"),
    ((2, 9), "torch has this name of a setting", r"test_agreement\.py.*newer name"),
    ((2, 13), "kernels copy tensors of float4_e2m1fn_x2", r"test_safetensors\.py.*(3, 4, 5|any_reader).*float4"),
    ((2, 9), "torch has Muon", r"\bMuon"),
]
"""The first version of torch that has it, what it has, and the tests."""


def pytest_collection_modifyitems(items):
    """Skip the tests of what this version lacks."""
    for since, what, pattern in LACKING:
        if since > VERSION:
            reason = f"{what} since {since[0]}.{since[1]}"
            for item in items:
                if re.search(pattern, item.nodeid):
                    item.add_marker(pytest.mark.skip(reason=reason))
