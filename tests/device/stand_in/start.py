"""Prepare a process in which ``import torch`` is to find a device more."""

import ctypes
import importlib
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import stand_in
from stand_in.build import LIBRARIES, folder_of_torch, library

TWIN = "standin"
"""The name of the device that is not called "cuda", but PrivateUse1 as torch has it."""


def before_torch(name: str) -> None:
    """Let the first ``import torch`` bring the device of this name."""
    assert name in ("cuda", TWIN), f"the stand-in is called cuda or {TWIN}, and not {name}"
    assert "torch" not in sys.modules, "torch looks for a device while it is imported: it is too late"
    sys.meta_path.insert(0, Finder(name))


class Finder(importlib.abc.MetaPathFinder):
    """Finds torch once, loads the device before it, and fits it in afterwards."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        assert spec is not None
        assert spec.loader is not None
        if self._name == "cuda":
            load_as_cuda()
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            after_torch(self._name)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def load_as_cuda() -> None:
    """Torch asks for the hooks of CUDA while it is imported, and keeps the answer."""
    libraries = folder_of_torch() / "lib"
    ctypes.CDLL(str(libraries / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    for each in LIBRARIES:
        ctypes.CDLL(str(libraries / f"lib{each}.so"))
    ctypes.CDLL(str(library())).as_cuda()


def after_torch(name: str) -> None:
    spec = importlib.util.spec_from_file_location("native", library())
    assert spec is not None
    assert spec.loader is not None
    stand_in.NAME = name
    stand_in.native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stand_in.native)
    importlib.import_module("stand_in.cuda" if name == "cuda" else "stand_in.twin")
