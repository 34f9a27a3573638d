"""Memory runs out on one rank of two that compute virtual ranks."""

import memory_errors
from memory_errors import Plan, trained
from rank_pair import on_two_ranks


def test_rank_computes_again_by_itself_while_the_others_wait_for_its_gradients():
    """Also in the last backward, in which gradients are sent; the end is that of one process."""
    expected = trained(None, Plan())
    plans = [("backward", 2), ("backward", 12), ("first", 3), ("backward", 2, 2), ("last", 4)]
    found = on_two_ranks(memory_errors.trained_on_ranks, 1, plans, {})
    for outcome in found[0] + found[1]:
        assert isinstance(outcome, dict), outcome
        assert outcome["tensors"] == expected["tensors"]
    for outcome in found[0]:
        assert (outcome["rows"], outcome["recorded"]) == (expected["rows"], expected["recorded"])


def test_wrapped_modules_are_refused_on_several_ranks_with_a_remedy():
    """DDP may exchange buffers in a forward, which the other ranks would not repeat."""
    found = on_two_ranks(memory_errors.trained_on_ranks, 1, [("first", 3)], {"wraps": True})
    assert all("leave the model plain" in outcome for (outcome,) in found), found
