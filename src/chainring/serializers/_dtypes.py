"""Dtypes by their names. Some came with a later torch than the oldest that Chainring runs on."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_SINCE = {"float8_e8m0fnu": "2.7", "float4_e2m1fn_x2": "2.8"}
"""The version of torch with which a dtype came."""


def find_dtypes(names: Iterable[str]) -> dict[str, torch.dtype]:
    """Return those of the named dtypes that this torch has."""
    return {name: getattr(torch, name) for name in names if name not in _SINCE or hasattr(torch, name)}


def require_dtype(name: object) -> None:
    """Do nothing, unless a value was saved in a dtype that this torch lacks and a later one has.

    Raises:
        ValueError: it was.
    """
    if name in _SINCE and not find_dtypes([str(name)]):
        rule = f"it holds {name}, which came with torch {_SINCE[str(name)]}, and this is {torch.__version__}"
        raise ValueError(f"{rule}: read it with torch {_SINCE[str(name)]} or newer")
