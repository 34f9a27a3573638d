"""Compile the part in C++, once for each state of its sources.

By the compiler alone: torch.utils.cpp_extension would import torch, before which "cuda" must be loaded, and ninja has
nothing to divide in one file, whose time is that of torch's headers.
"""

import hashlib
import os
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from shutil import which

SOURCES = Path(__file__).parent
BUILT = SOURCES.parent / "build"
CONSTRAINTS = SOURCES.parents[2] / "constraints.txt"
LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
FLAGS = ("-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-D_GLIBCXX_USE_CXX11_ABI=1", "-DTORCH_EXTENSION_NAME=native")


def folder_of_torch() -> Path:
    """Found without importing it."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def reason_against() -> str | None:
    """Why there can be no stand-in here, if so."""
    wanted = re.search(r"^torch==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE)
    assert wanted is not None
    present = version("torch").partition("+")[0]
    if sys.platform != "linux":
        return "its memory is made by Linux"
    if present != wanted[1]:
        return f"it is made for torch {wanted[1]}, and this is {present}"
    if (folder_of_torch() / "lib" / "libtorch_cuda.so").exists():
        return "this torch has a CUDA of its own: install the build for CPUs"
    if which("g++") is None:
        return "there is no g++"
    return None


def library() -> Path:
    """The compiled file, made if it is not there yet, in half a minute."""
    digest = hashlib.sha256(repr((version("torch"), sys.version, FLAGS)).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.read_bytes())
    file = BUILT / f"stand_in_{digest.hexdigest()[:16]}.so"
    if file.exists():
        return file
    torch, python = folder_of_torch(), sysconfig.get_path("include")
    BUILT.mkdir(exist_ok=True)
    made = file.with_suffix(f".{os.getpid()}")
    includes = [torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include", python]
    command = ["g++", *FLAGS, str(SOURCES / "stand_in.cpp"), "-o", str(made), f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib"]
    command += [word for include in includes for word in ("-isystem", str(include))]
    subprocess.run([*command, *(f"-l{name}" for name in LIBRARIES)], check=True)
    for other in BUILT.glob("stand_in_*.so"):
        other.unlink()
    made.replace(file)
    return file
