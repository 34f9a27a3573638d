"""What the scripts of this folder do for several processes, beside handing the communicator to the updater."""

from collections.abc import Iterable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from chainring.parallel import Communicator, create_communicator


def distribute(
    model: nn.Module, how: str, blocks: Iterable[nn.Module] = (), tensor: int = 1
) -> tuple[nn.Module, Communicator]:
    """Prepare a model for the processes that train together; make its optimizer afterwards.

    Each process computes on the accelerator of its number, or on the host where there is none. Alone, a process has nothing
    to exchange, and its model stays as it is.

    Args:
        model: the same on every rank; what differs is taken from rank 0 when the run starts.
        how: ``"none"``: the updater exchanges the gradients when the backward is done. ``"ddp"``: the model does it, while
            the backward continues. ``"fsdp"``: each rank keeps only its part of parameters, gradients and optimizer state.
        blocks: parts of the model whose parameters ``"fsdp"`` puts together one part at a time, not all at once.
        tensor: how many ranks compute the model together, on the same rows, as its method ``parallelize`` lays it out.

    Returns:
        The model, on its device, and the communicator.
    """
    comm = create_communicator()
    model.to(comm.device)
    if comm.size % tensor or (how == "ddp" and tensor > 1):
        raise ValueError(f"of {comm.size} ranks {tensor} compute the model together, with 'none' or 'fsdp'; got {how!r}")
    if comm.size == 1:
        return model, comm
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(comm.device.type, (comm.size // tensor, tensor), mesh_dim_names=("data", "tensor"))
    if tensor > 1:
        model.parallelize(mesh["tensor"])
        comm = create_communicator(mesh=mesh["data"])
    if how == "ddp":
        model = DistributedDataParallel(model, process_group=mesh["data"].get_group())
    if how == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for part in [*blocks, model]:  # the model last: it takes what no block has taken
            fully_shard(part, mesh=mesh["data"])
    return model, comm
