"""What an updater and its calls are given: converted to mappings by name, or refused with a remedy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_with_path

from chainring._checks import find_call_error, is_integer
from chainring._distributed.sharding import fsdp_modules, is_sharded, reshard
from chainring.converters import Converter
from chainring.iterators.base import Iterator
from chainring.iterators.loader import as_iterator
from chainring.reporting.reporter import report
from chainring.serializers.protocol import parameter_names
from chainring.training.updaters.callbacks import UpdateCallbacks, list_parameters

Loss = Tensor | Mapping[str, Any]
"""What a model or a loss function returns: the loss, or a mapping that has ``"loss"``."""

NO_FP16 = (
    'precision="fp16" scales the loss, by a factor that may change in the middle of a step, and a step with a closure reads '
    'the loss; use precision="bf16", which needs no scale'
)
NO_GRAPH = (
    "create_graph=True gives gradients a graph, which is lost where ranks or virtual ranks add them up, or where the scale "
    'of precision="fp16" is divided out; train in one process with "fp32" or "bf16"'
)
NO_NAN = (
    "DDP and fully_shard exchange gradients in the backward, also those of a loss of weight 0, and this one is not finite, "
    "which would reach every rank: divide by a count of at least 1, as by mask.sum().clamp(min=1)"
)
NO_VIRTUAL_RANKS = (
    "virtual_ranks computes the gradients of a step once, and an optimizer whose step needs a closure computes them as "
    "often as it likes; take another optimizer, or leave virtual_ranks out"
)


def check_models(given: Any) -> dict[str, nn.Module]:
    models = _by_name(given, "model")
    for name, model in models.items():
        if not isinstance(model, nn.Module):
            is_class = isinstance(model, type)
            hint = "; call the class to make one" if is_class else "; converter= is a keyword" if callable(model) else ""
            raise TypeError(
                f"a StandardUpdater takes an iterator, an optimizer and third the model, an nn.Module{hint}. "
                f"Model {name!r} is {_describe(model)}"
            )
        sharded, parameters = fsdp_modules(model), list[Any](model.parameters())
        is_on_host = any(is_sharded(parameter) and parameter.device_mesh.device_type == "cpu" for parameter in parameters)
        if sharded and is_on_host and not hasattr(torch.cpu.Stream, "record_event"):
            raise NotImplementedError(
                f"fully_shard computes on the CPU since torch 2.7, and this is {torch.__version__}: install a newer one, "
                f"wrap model {name!r} in DistributedDataParallel, or train on accelerators"
            )
        reshard(sharded)  # a forward without a backward leaves parameters gathered, which are other objects
    return models


def check_optimizers(given: Any, models: Mapping[str, nn.Module]) -> dict[str, Optimizer]:
    optimizers = _by_name(given, "optimizer")
    names = parameter_names(models)
    for name, optimizer in optimizers.items():
        if not isinstance(optimizer, Optimizer):
            remedy = "make one, such as torch.optim.Adam(model.parameters())"
            if hasattr(optimizer, "get_last_lr"):
                remedy = "give its optimizer, and the trainer an extension: extend(extensions.LRScheduler(scheduler))"
            raise TypeError(f"optimizer {name!r} must be a torch.optim.Optimizer, got {_describe(optimizer)}; {remedy}")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if hasattr(optimizer, "consolidate_state_dict"):
            raise ValueError(
                f"optimizer {name!r} is a {_describe(optimizer)}, whose state is divided among all ranks and cannot be "
                "saved; shard the model by torch.distributed.fsdp.fully_shard instead, and its optimizer's state is too"
            )
        if isinstance(optimizer, torch.optim.LBFGS) and any(map(is_sharded, parameters)):
            raise ValueError(
                f"optimizer {name!r} is LBFGS, which takes all gradients as one vector, and its parameters are sharded by "
                "fully_shard or parallelize_module; leave the model plain or wrap it in DistributedDataParallel"
            )
        foreign = sum(id(parameter) not in names for parameter in parameters)
        if foreign:
            raise ValueError(
                f"every parameter of an optimizer must belong to a registered model; of the {len(parameters)} of optimizer "
                f"{name!r}, {foreign} belong to none of {sorted(models)}. Make it from that model's parameters(), "
                "or register its model too: model={'main': ..., 'other': ...}. A parameter of no model is registered in "
                "a list: model={'main': ..., 'loose': torch.nn.ParameterList([parameter])}"
            )
    return optimizers


def check_balance(balance: Any, count: int | None, models: Mapping[str, nn.Module], iterators: Mapping[str, Any]) -> None:
    """Refuse a way to deal virtual ranks that is not known, or that this model and these iterators do not allow."""
    if balance not in ("even", "speed"):
        raise ValueError(f'balance is "even" or "speed", got {balance!r}')
    if balance == "even":
        return
    if count is None:
        raise ValueError(
            'balance="speed" deals virtual ranks, and the bits of a run without them depend on which rank computes which '
            "rows: give virtual_ranks too, a number of several for each rank"
        )
    if any(is_sharded(parameter) for model in models.values() for parameter in model.parameters()):
        raise ValueError(
            'with balance="speed" some ranks run more forwards than others, and in each forward of a model of fully_shard '
            "all ranks take part: leave the model plain or wrap it in DistributedDataParallel, or leave balance out"
        )
    check_dealt('balance="speed"', iterators)


def check_dealt(setting: str, iterators: Mapping[str, Any]) -> None:
    """Refuse iterators that cannot return the rows of virtual ranks that a setting deals anew in each update."""
    for name, iterator in iterators.items():
        if not isinstance(iterator, Iterator):
            raise ValueError(
                f"with {setting} iterators return the rows of a deal that changes, which {type(iterator).__name__} "
                f"{name!r} cannot; derive it from chainring.iterators.Iterator, or pass what it reads"
            )


def prepare_iterators(
    iterators: Mapping[str, Any], converter: Converter, count: int | None, size: int, callbacks: UpdateCallbacks
) -> None:
    """Tell iterators their names, and who takes their batches; refuse those that cannot be shared."""
    for name, source in iterators.items():
        if isinstance(source, Iterator):
            source.name = name
            source.use_converter(converter)
            if count is not None:
                source.use_virtual_ranks(count)
            source.check_share(size)
            if type(source).reported is not Iterator.reported:
                callbacks.add("batch_on_finish", lambda _, source=source: report(source.reported))  # type: ignore[misc]


def move(models: Iterable[nn.Module], device: torch.device | None, optimizers: Iterable[Optimizer]) -> None:
    """Move models with what optimizers have made for their parameters, which stay the objects that the optimizers hold."""
    if device is None:
        return
    origins = {id(parameter): parameter.device for model in models for parameter in model.parameters()}
    probe, swaps = nn.ParameterList([torch.ones(1, device="cpu")]), torch.__future__.get_swap_module_params_on_conversion()
    given, error = probe[0], None
    # For a device outside of PyTorch, or by a setting of torch.__future__, PyTorch makes new parameters, unless it swaps.
    torch.__future__.set_swap_module_params_on_conversion(swaps or probe.to(device)[0] is not given)
    try:
        for model in models:
            model.to(device)
    except RuntimeError as reason:
        if "swap" not in str(reason):
            raise
        error = reason
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    there = {id(parameter) for model in models for parameter in model.parameters()}
    if error is not None or any(id(p) in origins and id(p) not in there for p in list_parameters(optimizers)):
        raise ValueError(
            f"on {str(device)!r} the model has new parameters, and its optimizer would train the old ones; move the model "
            f"before its optimizer is made, by model.to({str(device)!r})"
        ) from error
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in optimizer.state and parameter.device != origins.get(id(parameter), parameter.device):
                    _move_state(optimizer, group, parameter, origins[id(parameter)])


def _move_state(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor, origin: torch.device) -> None:
    """Let what an optimizer has for a parameter follow it; counts of steps stay on the host where PyTorch has them there."""
    are_counts_there = group.get("capturable") or group.get("fused")

    def follow(path: tuple[Any, ...], value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device != origin:
            return value
        is_count = not value.ndim and (parameter.ndim > 0 or "step" in [getattr(key, "key", None) for key in path])
        return value if is_count and not are_counts_there else value.to(parameter.device)

    optimizer.state[parameter] = tree_map_with_path(follow, optimizer.state[parameter])


def as_iterators(given: Any) -> dict[str, Any]:
    return {} if given is None else {name: as_iterator(source) for name, source in _by_name(given, "iterator").items()}


def _by_name(given: Any, role: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        return {"main": given}
    if not given:
        remedy = "; give None for updates without data" if role == "iterator" else ""
        raise ValueError(f"at least one {role} is needed, got an empty dict{remedy}")
    return dict(given)


def check_settings(converter: Any, loss_func: Any, accumulate: Any, across_epochs: Any, callbacks: Any) -> None:
    if not callable(converter):
        raise TypeError(f"converter is called with a batch and a device, got {_describe(converter)}")
    if loss_func is not None:
        check_loss_func(loss_func)
    if not is_integer(accumulate):
        raise TypeError(f"accumulate is the number of micro-batches in an update, an integer, got {accumulate!r}")
    if accumulate < 1:
        raise ValueError(f"accumulate is the number of micro-batches in an update, at least 1, got {accumulate}")
    if not isinstance(across_epochs, bool):
        raise TypeError(f"accumulate_across_epochs is True or False, got {across_epochs!r}")
    if callbacks is not None and not isinstance(callbacks, UpdateCallbacks):
        raise TypeError(f"callbacks is an UpdateCallbacks, such as UpdateCallbacks(update_on_start=f), got {callbacks!r}")


def check_default_update(
    iterators: Mapping[str, Any], models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> None:
    registered: tuple[tuple[str, Mapping[str, Any]], ...] = (("iterator", iterators), ("model", models))
    for role, objects in registered:
        if objects and "main" not in objects:
            raise ValueError(
                f'the default update works with the {role} "main", got only {sorted(objects)}; '
                "rename one, or write update_core in a subclass"
            )
    arguments = (None,) if any(map(needs_closure, optimizers.values())) else ()
    for name, optimizer in optimizers.items():
        signature = inspect.signature(type(optimizer).step)
        try:
            signature.bind(optimizer, *arguments)
        except TypeError:
            call = "step(closure), because one of the optimizers needs a closure" if arguments else "step()"
            raise TypeError(
                f"the default update calls {call}, and that of optimizer {name!r} is {type(optimizer).__name__}.step"
                f"{signature}; write update_core in a subclass, which calls it otherwise"
            ) from None


def needs_closure(optimizer: Optimizer) -> bool:
    """Return True if the ``step`` of an optimizer has one required argument, which is a closure, as that of LBFGS."""
    # Of the class, because a scheduler wraps the object's.
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(required) == 1 and "closure" in required[0].name and required[0].kind is not inspect.Parameter.KEYWORD_ONLY


def check_loss_func(function: Any) -> None:
    """Refuse what cannot be called, and losses of PyTorch, which do not take the model first."""
    if not callable(function):
        raise TypeError(f"loss_func is a function of the model and the inputs, got {type(function).__name__}")
    while isinstance(function, functools.partial):
        function = function.func
    origin = type(function).__module__ if isinstance(function, nn.Module) else getattr(function, "__module__", None)
    if str(origin).startswith("torch."):
        name = _name(function)
        raise TypeError(
            f"loss_func is called with the model first, then the inputs, and {name} takes no model; "
            f"write loss_func=lambda model, x, t: loss(model(x), t) with loss = that {name}, "
            "or wrap the model: chainring.nn.Classifier(model, lossfun=loss)"
        )


def check_call(
    model: nn.Module,
    loss_func: Callable[..., Any] | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    eval_func: Callable[..., Any] | None = None,
) -> None:
    """Refuse the one of these functions that was called, if its parameters do not fit the arguments."""
    inputs = f"{len(args)} inputs" if args else f"the inputs {sorted(kwargs)}" if kwargs else "no inputs"
    function: Any = model
    rule = f"without a loss_func the model is called with {inputs}, which are the batch, and returns the loss"
    remedy = "Wrap it, as chainring.nn.Classifier(model) does for labels, or give loss_func=lambda model, x, t: ..."
    if eval_func is not None:
        function, rule = eval_func, f"eval_func is called with {inputs}, which are the batch, without the model"
        remedy = (
            "A function that takes the model first is the loss_func of an Evaluator, which by default is that of the updater"
        )
    elif loss_func is not None:
        function, args = loss_func, (model, *args)
        rule = f"loss_func is called with the model first and then {inputs}"
        remedy = (
            "Write it as loss_func(model, *inputs), for example lambda model, x, t: ...; inside, use that model and no other"
        )
    forward = function.forward if isinstance(function, nn.Module) else function
    name = f"{type(model).__name__}.forward" if function is model else _name(function)
    if error := find_call_error(forward, *args, **kwargs):
        raise TypeError(f"{rule}; {name}{inspect.signature(forward)} cannot be: {error}. {remedy}") from None


def check_loss(loss: Any, function: Any = None) -> None:
    """Refuse a loss that is not a scalar tensor with a gradient; a model or a ``function`` has returned it."""
    origin = "" if function is None else f" from {origin_of(function)}"
    if not isinstance(loss, Tensor):
        got = f"{type(loss).__name__} with {list(loss)}" if isinstance(loss, Mapping) else type(loss).__name__
        raise TypeError(
            f'the loss is a scalar tensor, or a mapping that has "loss"; got {got}{origin}. '
            "Return the tensor, without .item(), from the model (chainring.nn.Classifier does) or loss_func(model, *inputs)"
            '; or {"loss": loss, "weight": 0} to skip a batch, with any loss that depends on a parameter'
        )
    if loss.ndim:
        remedy = "an output becomes a loss by cross_entropy(y, t) and the like, losses of examples by .mean()"
        raise ValueError(f"the loss is a scalar tensor, got one of shape {tuple(loss.shape)}{origin}; {remedy}")
    if not loss.requires_grad:
        raise ValueError(
            "the loss depends on no parameter that needs a gradient, so there is nothing to train; "
            "look for detach(), no_grad() or parameters with requires_grad=False"
        )


def origin_of(function: Any) -> str:
    """Return the name of a function, or of the forward of a model, and the line where it is defined."""
    forward = inspect.unwrap(function.forward if isinstance(function, nn.Module) else function)
    code = getattr(forward, "__code__", None)
    return f"{forward.__qualname__}, {code.co_filename}:{code.co_firstlineno}" if code else _name(function)


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _describe(given: Any) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else _name(given)
