"""Updates: the model, the loss, the hooks, the converter."""

import numpy as np
from either import (
    IS_CHAINER,
    Line,
    as_input,
    classifier,
    extensions,
    iterators,
    make_updater,
    points,
    report,
    rows,
    sgd,
    to_list,
    training,
)

if IS_CHAINER:
    import chainer
else:
    from chainring.training import UpdateCallbacks, clip_grad_norm, clip_grad_value


def _train(model, optimizer, data=None, **settings):
    iterator = iterators.SerialIterator(points() if data is None else data, 4, shuffle=False)
    trainer = training.Trainer(make_updater(iterator, optimizer, model, **settings), (6, "iteration"))
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    trainer.run()
    return rows(trainer)


def loss_function():
    """`loss_func(*inputs)`, here `loss_func(model, *inputs)`."""
    model = Line()

    def loss_func(*inputs):
        x, t = inputs[-2:]
        loss = 3 * model(x, t)
        report({"three": loss}, model)
        return loss

    return [_train(model, sgd(model, 0.1), loss_func=loss_func), to_list(model.w)]


def own_converter():
    """`converter(batch, device)` is given a batch of examples, and the model what it returns."""
    model = Line()
    sizes = []

    def convert(batch, device):
        sizes.append(len(batch))
        x, t = (np.stack([example[i] for example in batch]) for i in (0, 1))
        return as_input(x), as_input(2 * t)

    settings = {"converter": chainer.dataset.converter()(convert) if IS_CHAINER else convert}
    return [_train(model, sgd(model, 0.1), **settings), to_list(model.w), sizes]


def clipping():
    """`GradientClipping(0.5)`, here `clip_grad_norm(0.5)`."""
    model = Line()
    optimizer, settings = sgd(model, 0.1), {}
    if IS_CHAINER:
        optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(0.5))
    else:
        settings = {"callbacks": UpdateCallbacks(update_on_start=clip_grad_norm(0.5))}
    _train(model, optimizer, **settings)
    return to_list(model.w)


def hard_clipping():
    """`GradientHardClipping(-0.1, 0.1)`, here `clip_grad_value(0.1)`."""
    model = Line()
    optimizer, settings = sgd(model, 0.1), {}
    if IS_CHAINER:
        optimizer.add_hook(chainer.optimizer_hooks.GradientHardClipping(-0.1, 0.1))
    else:
        settings = {"callbacks": UpdateCallbacks(update_on_start=clip_grad_value(0.1))}
    _train(model, optimizer, **settings)
    return to_list(model.w)


def weight_decay():
    """`WeightDecay(0.1)`, here `weight_decay=0.1` of the optimizer; `MomentumSGD`, here `SGD(momentum=0.9)`."""
    model = Line()
    if IS_CHAINER:
        optimizer = chainer.optimizers.MomentumSGD(0.05, 0.9).setup(model)
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.1))
    else:
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.1)
    _train(model, optimizer)
    return to_list(model.w)


def classification():
    """`Classifier`: loss and accuracy of each update, from the same weights."""
    random = np.random.RandomState(1)
    weights, bias = random.rand(3, 2).astype(np.float32), random.rand(3).astype(np.float32)
    data = [(x, np.int32(i % 3) if IS_CHAINER else i % 3) for i, (x, _) in enumerate(points())]
    model = classifier(weights, bias)
    return _train(model, sgd(model, 0.5), data)


def mapping():
    """A dataset of mappings: the model is called with keywords."""
    model = Line()
    data = [{"x": x, "t": t} for x, t in points()]
    return [_train(model, sgd(model, 0.1), data), to_list(model.w)]


def own_update():
    """`update_core` of one's own, with `get_iterator`, `get_optimizer` and `connect_trainer`."""
    base = training.updaters.StandardUpdater if IS_CHAINER else training.StandardUpdater
    seen = []

    class Mine(base):
        def update_core(self):
            seen.append([len(next(self.get_iterator("main"))), self.iteration, self.epoch])
            if not IS_CHAINER:
                self.get_optimizer("main").zero_grad()

    model = Line()
    iterator = iterators.SerialIterator(points(), 4, shuffle=False)
    updater = Mine(iterator, sgd(model, 0.1)) if IS_CHAINER else Mine(iterator, sgd(model, 0.1), model)
    training.Trainer(updater, (2, "epoch")).run()
    return [seen, updater.iteration, updater.epoch]
