"""What the scripts of this folder do for several processes, beside handing the communicator to the updater."""

from collections.abc import Iterable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from chainring.parallel import Communicator, create_communicator


def distribute(model: nn.Module, how: str, blocks: Iterable[nn.Module] = ()) -> tuple[nn.Module, Communicator]:
    """Prepare a model for the processes that train together; make its optimizer afterwards.

    Each process computes on the accelerator of its number, or on the host where there is none. Alone, a process has nothing
    to exchange, and its model stays as it is.

    Args:
        model: the same on every rank; what differs is taken from rank 0 when the run starts.
        how: ``"none"``: the updater exchanges the gradients when the backward is done. ``"ddp"``: the model does it, while
            the backward goes on. ``"fsdp"``: each rank keeps only its part of parameters, gradients and optimizer state.
        blocks: parts of the model whose parameters ``"fsdp"`` puts together one part at a time, not all at once.

    Returns:
        The model, on its device, and the communicator.
    """
    comm = create_communicator()
    model.to(comm.device)
    if how == "ddp" and comm.size > 1:
        model = DistributedDataParallel(model)
    if how == "fsdp" and comm.size > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(comm.device.type, (comm.size,))
        for part in [*blocks, model]:  # the model last: it takes what no block has taken
            fully_shard(part, mesh=mesh)
    return model, comm
