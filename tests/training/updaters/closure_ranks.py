"""What each of two ranks trains with LBFGS, for test_closures.py."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from toys import parameters_of, regression_data, same_regression

from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, UpdateCallbacks, clip_grad_norm


def bucket_views(model):
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def sharded(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


REPLICATED = {"plain": lambda model: model, "ddp": DistributedDataParallel, "ddp with bucket views": bucket_views}
MODELS = {**REPLICATED, "sharded": sharded}


class WithBackward(StandardUpdater):
    def update_core(self):
        x, t = self.next_batch()

        def closure():
            loss = self.get_model("main")(x, t)
            loss.backward()
            return loss

        self.step(closure=closure)


SETTINGS = ({}, {"accumulate": 2}, {"callbacks": UpdateCallbacks(update_on_start=clip_grad_norm(0.1))})


def train_each_on_rank(comm, wrapping):
    """The parameters after three updates under each of `SETTINGS`."""
    return [train_on_rank(comm, wrapping, **settings) for settings in SETTINGS]


def train_on_rank(comm, wrapping, kind=StandardUpdater, **settings):
    """The parameters after three updates."""
    model = MODELS[wrapping](same_regression())
    iterator = SerialIterator(regression_data(), 5, shuffle=False)
    iterator.share(comm.rank, comm.size)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=5, line_search_fn="strong_wolfe")
    updater = kind(iterator, optimizer, model, comm=comm, **settings)
    updater.start()
    for _ in range(3):
        updater.update()
    return [parameter.tolist() for parameter in parameters_of(updater)]
