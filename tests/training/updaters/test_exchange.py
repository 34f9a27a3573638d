"""On several ranks, an update in which they do not exchange what they must is an error, and no other is."""

import pytest
import torch
from exchange_ranks import (
    ByHand,
    ByItself,
    OneOfTwo,
    OwnStep,
    Rarely,
    Shared,
    WeighedByItself,
    WithClosure,
    diverging_on_rank,
    followed,
    followed_on_rank,
    make,
    mean_square,
    sparse_model,
    train,
    train_on_rank,
    train_sparse,
)

from chainring.iterators import SerialIterator
from chainring.parallel import Communicator
from chainring.training import StandardUpdater
from rank_pair import on_two_ranks


def test_an_update_in_which_an_optimizer_steps_by_itself_raises_on_every_rank():
    """Before it counts, and with the line to write: called plainly, with a closure, in micro-batches, beside a step."""
    kinds = [ByItself, WeighedByItself, WithClosure, OwnStep, OneOfTwo]
    runs = [(kind, False, {}) for kind in kinds] + [(ByItself, False, {"accumulate": 2})]
    for found in on_two_ranks(train_on_rank, runs):
        for (text, updates), (kind, _, _) in zip(found, runs, strict=True):
            name = "second" if kind is OneOfTwo else "main"
            assert f"update_core has let optimizer {name!r} step by itself" in text, (kind, text)
            assert f"self.step({name!r})" in text
            assert updates == 0


def test_an_update_that_changes_parameters_by_hand_raises_on_every_rank():
    """The ranks compare them after an update without any step."""
    for ((text, updates),) in on_two_ranks(train_on_rank, [(ByHand, False, {})]):
        assert "after an update without self.step() the 2 ranks have different parameters" in text
        assert (text.count("update_core"), updates) == (2, 0)


def test_an_update_without_a_step_is_no_error_if_the_ranks_agree():
    """Updates that only look, or limit the parameters in the same way on all ranks."""
    (alone, _), runs = train(make(Rarely)), [(Rarely, False, {})]
    for ((parameters, updates),) in on_two_ranks(train_on_rank, runs):
        assert updates == 4, parameters
        torch.testing.assert_close(parameters, alone)


def test_a_model_of_ddp_may_exchange_by_itself_but_not_with_weighed_losses():
    """``loss.backward()`` and ``optimizer.step()`` are a mean over ranks; after ``self.backward`` it would be half of it.

    Nor with a closure, which returns the loss of each rank to its own optimizer.
    """
    runs = [(ByItself, True, {}), (WeighedByItself, True, {}), (WithClosure, True, {})]
    first, second = on_two_ranks(train_on_rank, runs)
    assert first[0] == second[0]
    assert first[0][1] == 4
    assert all("step by itself" in text for text, _ in (*first[1:], *second[1:]))


def test_one_process_may_step_as_it_likes():
    """There is nothing to exchange."""
    for kind in (ByItself, WithClosure, OwnStep, ByHand, OneOfTwo):
        assert train(make(kind))[1] == 4


def test_gradients_that_are_not_exchanged_yet_do_not_enter_the_norm_by_which_others_are_clipped():
    """The generator's loss reaches the critic, on each rank by another gradient: ranks would clip by different norms."""
    alone, _ = train(make(Shared))
    first, second = on_two_ranks(train_on_rank, [(Shared, False, {})])
    assert first == second
    torch.testing.assert_close(first[0][0], alone)


SPARSE = [  # a model, the optimizer, whether this is known when the updater is made
    ("a layer", "SGD", True),
    ("a layer", "SparseAdam", True),
    ("a bag", "SGD", True),
    ("within", "Adagrad", True),
    ("a class", "SGD", True),
    ("DDP", "SGD", True),
    ("gather", "SparseAdam", True),
    ("gather", "SGD", False),
    ("a function", "SGD", False),
]


def test_sparse_gradients_are_refused_on_ranks_with_what_to_write():
    """At construction, if a layer or the optimizer tells of them, else in the first update: plain and virtual ranks."""
    cases = [(kind, name, settings) for kind, name, _ in SPARSE for settings in ({}, {"virtual_ranks": 2})]
    for found in on_two_ranks(train_sparse, cases):
        assert len(found) == len(cases)
        for (_, text, at_construction), is_known in zip(
            found, [known for *_, known in SPARSE for _ in range(2)], strict=True
        ):
            assert "give its layer sparse=False, and an optimizer that takes dense gradients" in text
            assert at_construction is is_known, text


def test_sparse_gradients_stay_sparse_in_one_process():
    """Alone and in micro-batches, where SparseAdam adds them up."""
    for settings in ({}, {"accumulate": 2}, {"comm": Communicator()}):
        model = sparse_model("a layer")
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        before = model.weight.detach().clone()
        iterator = SerialIterator(list(range(4)), 2, shuffle=False)
        StandardUpdater(iterator, optimizer, model, loss_func=mean_square, **settings).update()
        changed = (model.weight != before).any(1).nonzero().flatten().tolist()
        assert changed == list(range(2 * settings.get("accumulate", 1)))


@pytest.mark.parametrize("virtual_ranks", [None, 2, 4])
def test_ranks_whose_parameters_differ_are_told_in_the_first_updates_and_at_a_snapshot(virtual_ranks):
    """An extension that draws, a learning rate by the loss, weights scaled, a forward that writes; and, later, one ulp."""
    names = ["predictor.weight", "predictor.weight", "predictor.weight", "centre", "table.weight", "predictor.bias"]
    updates = [1, 0, 0, 0, 0, 6]
    for said in on_two_ranks(diverging_on_rank, virtual_ranks):
        assert isinstance(said, list), said
        assert [iteration for _, iteration in said] == updates
        for (text, _), name in zip(said, names, strict=True):
            says = [f"'main.{name}'", *([] if virtual_ranks is None else [name, "'lr': ", "max_norm"])]
            assert any(word in text for word in says), text
        assert "the 2 ranks share the data and train one model" in said[0][0]
        assert "the 2 ranks share the data and train one model" in said[-1][0]


def test_average_that_every_virtual_rank_updates_is_updated_once():
    """The same bits on two ranks, each with one virtual rank or two; those of an update without them up to rounding."""
    cases = [(count, times, number) for count in (2, 4) for times in (1, 2) for number in (1, 2)]
    alone = [followed(*case) for case in cases]
    for found in on_two_ranks(followed_on_rank, cases):
        assert found == alone
