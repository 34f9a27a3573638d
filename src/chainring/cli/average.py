"""``chainring average SNAPSHOT... PLACE``: write the mean of the models of snapshots, a "model soup"."""

from __future__ import annotations

import argparse
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chainring._places.base import StoredFile
from chainring._runs.finished import describe_file, is_model, locate
from chainring.cli._common import add_command
from chainring.cli.export import read_model, require_new, show_written, write_model
from chainring.serializers import _safetensors
from chainring.serializers._values import find_aliases

_HELP = """
Write the mean of the models of several snapshots, without their code: as one
file, which serializers.load and every reader of safetensors take. Parameters
and buffers of floating-point numbers are added in float64 and have the dtype
of the last snapshot; all other buffers, such as counters, are those of the
last. The running statistics of BatchNorm are not estimated anew: see
torch.optim.swa_utils.update_bn. NaN is refused, and infinities where not all
have the same, as a mask has. What exists is not overwritten.

examples:
  chainring average result/snapshot_iter_{8000,9000,10000} mean.safetensors
  chainring average first second mean.safetensors      the newest of two runs
  chainring average a b mean.safetensors --weights 3 1

exit status:
  0  it is written
  1  a snapshot is damaged
  2  the models differ in more than their numbers, or one has NaN; or PLACE
     exists"""


def add_to(commands: Any) -> None:
    parser = add_command(commands, "average", run, "write the mean of the models of snapshots", _HELP)
    parser.add_argument("snapshots", nargs="+", metavar="SNAPSHOT", help="a snapshot, a model's file, or a run (its newest)")
    parser.add_argument("place", metavar="PLACE", help="the file to write")
    parser.add_argument("--model", metavar="NAME", help="name of the model, where there are several (default: main)")
    parser.add_argument("--weights", nargs="+", type=float, metavar="W", help="one of each snapshot (default: all alike)")


def run(options: argparse.Namespace) -> None:
    sources, target = options.snapshots, options.place
    weights = [1.0] * len(sources) if options.weights is None else options.weights
    if len(sources) < 2:
        raise ValueError(f"a mean is of two or more snapshots, got {sources[0]}; the directory of a run is its newest alone")
    if len(weights) != len(sources):
        raise ValueError(f"--weights has a number for each of the {len(sources)} snapshots, got {len(weights)}")
    if not all(0 <= weight < math.inf for weight in weights) or not 0 < sum(weights) < math.inf:
        raise ValueError(f"weights are finite numbers of 0 or more, not all 0, got {' '.join(map(str, weights))}")
    require_new(target)
    sums: dict[str, Tensor] = {}
    infinite: dict[str, tuple[str, Tensor | None]] = {}
    models: list[_Model] = []
    for source, weight in zip(sources, weights, strict=True):
        last, tensors = _read(source, options.model)
        if models:
            last.check_against(models[0])
        models.append(last)
        for key, tensor in tensors.items() if weight else ():
            if tensor.is_floating_point() or tensor.is_complex():
                wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
                _check_finite(key, wide, last.name, infinite)
                term = wide * weight
                sums[key] = sums[key].add_(term) if key in sums else term
    means = {key: total.div_(sum(weights)).to(tensors[key].dtype) for key, total in sums.items()}
    mean = {key: means.get(last.ties[key], tensor) for key, tensor in tensors.items()}
    write_model(target, "safetensors", mean)
    names = [model.name for model in models]
    facts = {"file": target, "of": names, "weights": weights, "tensors": sorted(mean), "averaged": sorted(sums)}
    lines = [f"{target}: the mean of {len(names)} models, {len(sums)} of {len(mean)} tensors averaged"]
    lines += [f"  {name}, weight {weight / sum(weights):.4g}" for name, weight in zip(names, weights, strict=True)]
    show_written(options, facts, lines, last.name, last.left_out)


def _check_finite(key: str, tensor: Tensor, name: str, infinite: dict[str, tuple[str, Tensor | None]]) -> None:
    """Refuse NaN, and infinities but those of a mask, which all models have at the same places."""
    is_finite = tensor.isfinite()
    found = None if is_finite.all() else tensor.where(~is_finite, torch.zeros_like(tensor))
    first_name, first = infinite.setdefault(key, (name, found))
    is_same = found is first if found is None or first is None else bool((found == first).all())
    if not is_same:
        raise ValueError(
            f"{key} of {first_name if found is None else name} has numbers that are not finite, and so would the mean: "
            "leave it out, or take an earlier snapshot, such as one from before the loss was NaN"
        )


class _Model(NamedTuple):
    """What is compared of a model before its numbers are added."""

    name: str  # of the snapshot or file
    layout: dict[str, str]  # by the name of a tensor its shape, and to which it is tied, in words
    ties: dict[str, str]  # by the name of a tensor that of the first that is the same memory
    left_out: list[str]  # parameters that were frozen and are not in it

    def check_against(self, first: _Model) -> None:
        """Raise unless the mean of both is a model."""
        for key in sorted(first.layout | self.layout):
            one, other = (model.layout.get(key, "absent") for model in (first, self))
            if one != other:
                found = f"{key} is {one} in {first.name}, and {other} in {self.name}"
                raise ValueError(f"{found}: a mean is of models of one architecture")


def _read(source: str, model: str | None) -> tuple[_Model, dict[str, Tensor]]:
    located, name, left_out = locate(source), source, list[str]()
    if not isinstance(located, StoredFile):
        name = str(located[0])
        _, tensors, left_out = read_model(located[0], model)
    elif is_model(located) and model is None:
        tensors = dict(_safetensors.read(located))
    else:
        raise ValueError(f"{source} is {'of one model: leave out --model' if is_model(located) else describe_file(located)}")
    ties = find_aliases(tensors)
    tied = {key: f", tied to {first}" for key, first in ties.items() if first != key}
    layout = {key: f"of shape {list(tensor.shape)}{tied.get(key, '')}" for key, tensor in tensors.items()}
    return _Model(name, layout, ties, left_out), tensors
