"""What it takes to repeat a run, for its record: the code, the distributions, and the variables that change numbers.

Nothing secret enters. Of the environment only variables of a list are taken. A file with something that looks like a secret
is left out as a whole and named, and such a value is left out of arguments and of the config.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import torch

LEFT_OUT = "(left out)"
"""In place of a value that looks like a secret."""
VARIABLES = frozenset({
    "ATEN_CPU_CAPABILITY", "BLIS_NUM_THREADS", "CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG", "DNNL_MAX_CPU_ISA",
    "DNNL_DEFAULT_FPMATH_MODE", "KMP_DETERMINISTIC_REDUCTION", "MIOPEN_DEBUG_CONVOLUTION_DETERMINISTIC", "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE", "MKL_DYNAMIC", "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS", "MKL_THREADING_LAYER", "NCCL_ALGO",
    "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_NVLS_ENABLE", "NCCL_PROTO", "NPY_DISABLE_CPU_FEATURES",
    "NPY_ENABLE_CPU_FEATURES", "NUMEXPR_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "OMP_DYNAMIC", "OMP_MAX_ACTIVE_LEVELS",
    "OMP_NUM_THREADS", "OMP_SCHEDULE", "OMP_THREAD_LIMIT", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTORCH_ENABLE_MPS_FALLBACK",
    "PYTORCH_JIT", "PYTORCH_MPS_FAST_MATH", "TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_COMPILE_DISABLE", "TORCH_CUDNN_V8_API_DISABLED", "VECLIB_MAXIMUM_THREADS",
})  # fmt: skip
"""Variables of the environment that change numbers; no others are taken."""

UNUSED = "it is in no commit, and was not imported"
GIT_SECONDS = 4.0
"""How long git may take in all, before a run begins."""

_LARGEST = 1 << 20  # bytes of a script, and of the difference together with the files that no commit has
_MOST_NAMED = 100
_TOO_LARGE = "it is too large: the record takes 1 MiB of code"
_WORDS = (
    r"(?:passw(?:or)?d|passphrase|secret|token|bearer|credential|pwd|auth"
    r"|(?:api|access|private|secret|wandb|auth)[_-]?key)s?"
)
_SECRET_NAME = re.compile(rf"{_WORDS}$", re.IGNORECASE)  # of an option, a key or a variable
_NO_SECRET = re.compile(r"-?[\d.]{0,8}|<.*>|\[.*\]|true|false|none|null", re.IGNORECASE)  # as the pad_token of texts
_SECRET_FILE = re.compile(
    r"(?:^|/)(?:[._]?netrc|\.pypirc|\.npmrc|\.git-credentials|id_(?:rsa|dsa|ecdsa|ed25519)|\.(?:aws|ssh)/|\.env)"
    r"|(?:secret|credential|passw(?:or)?d|api_?key)[^/]*$|\.(?:env|pem|key|p12|pfx|jks|keystore|kdbx)$",
    re.IGNORECASE,
)
_SECRET = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\bsk-(?:[a-z]+-)*[A-Za-z0-9_]{20,}|\b[sr]k_(?:live|test)_\w{16,}"  # of services
    r"|\bgh[a-z]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{22,}|\bglpat-[\w-]{20,}|\bxox[a-z]-[\w-]{16,}|\bhf_[A-Za-z0-9]{30,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\bAIza[\w-]{35}|\bya29\.[\w-]{20,}|\bnpm_[A-Za-z0-9]{36}|\bpypi-[\w-]{50,}|\beyJ[\w-]{10,}\.[\w-]{10,}\.|\bSG\.[\w-]{16,}\.[\w-]{16,}"
    r"|\w://[^/\s:@\"'{}$]*:[^/\s@\"'{}$]+@|https?://[\w.~%+-]{16,}@"  # a password or a token in an address
    r"|(?i:[?&](?:[\w-]*(?:signature|token|secret|password|api_?key|credential)|sig)=[^&\s\"'{}]{8,})"
    r"|(?i:\b(?:bearer|basic)\s+(?=[a-z._/+=-]*\d)[a-z0-9._/+=-]{16,})"
    rf"|(?i:{_WORDS}[\"']?\]?(?:\s*:\s*\w+)?\s*(?:=|:|,(?:\s*\w+\s*=\s*[\w.]+\s*,)*\s*default\s*=)\s*"  # in code
    r"[bfr]?[\"'][^\"'\s<>{}\[\]]{6,}[\"'])"
    r"|(?i:(?:login|key|auth|wandb)\w*[^\n]{0,40}?[\"'](?=[a-z_-]*\d)(?=[\d_-]*[a-z])[a-z0-9_-]{32,}[\"'])"
)
_LINE = re.compile(
    r"^[+\- ]?[ \t]*(?:export[ \t]+)?([\w.-]+)[ \t]*[:=][ \t]*(?![\"']?\$(?:[({]|[A-Z_]+\b))(\S{6,})[ \t]*$", re.MULTILINE
)
"""A name and its value in a file that has no quotes, unless that refers to a variable."""


@functools.cache
def provenance() -> dict[str, Any]:
    """Return what this process, which repeats it, would have to have: its code, distributions and variables."""
    values = {name: os.environ[name] for name in sorted(VARIABLES & os.environ.keys())}
    source = _source()
    parts = [source[name] for name in ("commit", "script", "text", "difference", "files")]
    return {
        "source": source,
        "code": hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest(),  # the same for the same code
        "distributions": distributions(),
        "environment": {name: value for name, value in values.items() if re.fullmatch(r"[\w.,:;=+/ -]{0,200}", value)},
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


# --- secrets ---


def _has_secret(text: str, *, is_code: bool = True) -> bool:
    """Return whether a text has something that looks like a secret; outside of code values need no quotes."""
    return bool(_SECRET.search(text)) or (not is_code and any(_is_secret(*pair) for pair in _LINE.findall(text)))


def _is_secret(name: str, value: str) -> bool:
    """Return whether a name is that of a secret, and the value may be one."""
    return _SECRET_NAME.search(name) is not None and not _NO_SECRET.fullmatch(value.strip("\"'"))


@functools.lru_cache(8)
def withhold(text: str) -> dict[str, Any]:
    """Return the mapping in a JSON text, of a config and of arguments, with `LEFT_OUT` for what looks like a secret."""
    settings = json.loads(text)
    return {"config": _without("", settings["config"]), "argv": _without_arguments(settings["argv"])}


def _without(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        items = () if _SECRET_NAME.search(name) else value.items()
        return {key: _without(key, item) for key, item in items if not _has_secret(key)}
    if isinstance(value, list):
        return [_without(name, item) for item in value]
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return value
    is_secret = _is_secret(name, str(value)) or (isinstance(value, str) and _has_secret(value))
    return LEFT_OUT if is_secret else value


def _without_arguments(arguments: Iterable[str]) -> list[str]:
    kept, before = [], ""  # the option whose value comes next
    for argument in arguments:
        option, equals, value = argument.partition("=")
        is_option = argument.startswith("-")
        if equals and _is_secret(option, value):
            kept.append(f"{option}={LEFT_OUT}")
        else:
            is_secret = _has_secret(argument, is_code=False) or (not is_option and _is_secret(before, argument))
            kept.append(LEFT_OUT if is_secret else argument)
        before = argument if is_option and not equals else ""
    return kept


# --- the code ---


def _ask_git(directory: str, deadline: float, *arguments: str) -> Callable[[], str | None]:
    """Ask; return what waits, until a moment of the monotonic clock, for what git prints.

    Bytes that are no UTF-8 are escaped. It is ``None`` if git fails, is absent or takes long.
    """
    command = ["git", "--no-optional-locks", "-c", "core.quotePath=false", *arguments]
    quiet = subprocess.DEVNULL
    try:
        process = subprocess.Popen(command, cwd=directory, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet)
    except OSError:
        return lambda: None

    def wait() -> str | None:
        with process:
            try:
                printed = process.communicate(timeout=max(deadline - time.monotonic(), 0.01))[0]
            except subprocess.TimeoutExpired:
                process.kill()
                return None
        return None if process.returncode else printed.decode(errors="surrogateescape")

    return wait


def _source() -> dict[str, Any]:
    """Return the code that runs: a commit and what differs from it, the text of the script, and what is left out."""
    script = _find_script()
    directory = os.path.realpath(os.getcwd())
    root, deadline = str(script.parent) if script else directory, time.monotonic() + GIT_SECONDS
    git = functools.partial(_ask_git, root, deadline)
    commit_and_root = git("rev-parse", "HEAD", "--show-toplevel")
    remote = git("config", "--get", "remote.origin.url")
    options = ("--no-renames", "--untracked-files=normal", "--ignore-submodules=dirty")
    status = git("status", "--porcelain", "-z", *options)  # while the imported modules are looked at
    told = (commit_and_root() or "").splitlines()
    commit, root = told if len(told) == 2 else (None, root)
    git = functools.partial(_ask_git, root, deadline)
    imported, paths = _imported(root)
    listed, address = status(), remote()
    left_out: dict[str, str] = {}
    difference, changed = ("", set[str]()) if commit is None else _difference(git, root, listed, left_out)
    script_name = _relative(str(script), root) if script else None
    text = None if script is None else _admit(script, script_name or "", left_out, _LARGEST)
    names = {name for path in imported if (name := _relative(path, root)) is not None} - {script_name}
    tracked = git("ls-files", "-z", "--", *sorted(names))() if commit is not None and names else ""
    files, room = dict[str, str](), _LARGEST - len(difference)
    for name in sorted(names - changed - set((tracked or "").split("\0"))):
        if (content := _admit(Path(root, name), name, left_out, room)) is not None:
            files[name] = content
            room -= len(content)
    more = len(left_out) - _MOST_NAMED
    shown = dict(list(left_out.items())[:_MOST_NAMED]) | ({"...": f"and {more} more"} if more > 0 else {})
    return {
        "directory": directory,
        "root": root,
        "commit": commit,
        "remote": commit and _without_user((address or "").strip()),
        "script": script_name,
        "text": text,
        "difference": difference,
        "files": files,
        "paths": paths,
        "left_out": shown,
    }


def _find_script() -> Path | None:
    """Return the file that runs; ``None`` in a notebook, or for a program that was typed in."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    given = [sys.argv[0] if sys.argv else "", main or ""] if main else []
    return next((Path(os.path.realpath(name)) for name in given if name and os.path.isfile(name)), None)


def _relative(path: str, root: str) -> str | None:
    return Path(path).relative_to(root).as_posix() if path.startswith(os.path.join(root, "")) else None


def _imported(root: str) -> tuple[list[str], list[str]]:
    """Return the imported files below a directory, and the paths from which code outside of packages is imported.

    A path inside the directory is relative to it.
    """
    library = tuple(os.path.join(sysconfig.get_path(key), "") for key in ("stdlib", "platstdlib"))
    inner, paths = [], dict[str, None]()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or "site-packages" in file or "dist-packages" in file or name == "__main__":
            continue
        if file.startswith(library) or not file.endswith(".py") or not os.path.isabs(file) or not os.path.isfile(file):
            continue  # as what PyTorch names so that lies nowhere
        file = os.path.realpath(file)
        if _relative(file, root) is not None:
            inner.append(file)
        stem = file.removesuffix(".py").removesuffix(f"{os.sep}__init__")
        below = os.sep + name.replace(".", os.sep)
        if stem.endswith(below):
            paths[stem.removesuffix(below)] = None
    return inner, list(dict.fromkeys("." if path == root else _relative(path, root) or path for path in paths))


def _difference(git: Callable[..., Any], root: str, listed: str | None, left_out: dict[str, str]) -> tuple[str, set[str]]:
    """Return the difference of the files that the commit has, and their names; note what of it is left out.

    ``listed`` is the status that git has printed.
    """
    if listed is None:
        left_out["*.py"] = f"git did not say within {GIT_SECONDS:g} seconds what differs from the commit"
        return "", set()
    entries = [(entry[:2], entry[3:]) for entry in listed.split("\0") if entry]
    left_out |= {name: UNUSED for kind, name in entries if kind == "??"}
    changed = {name for kind, name in entries if kind != "??"}
    for name in changed:
        with suppress(OSError):
            if os.path.getsize(os.path.join(root, name)) > _LARGEST:
                left_out[name] = _TOO_LARGE
    wanted = sorted(changed - left_out.keys())
    if not wanted:
        return "", changed
    options = ("--no-renames", "--no-color", "--no-ext-diff", "--no-textconv", "--full-index")
    prefixes = ("--src-prefix=a/", "--dst-prefix=b/", "--ignore-submodules=dirty")
    text = git("diff", "HEAD", *options, *prefixes, "--", *wanted)()
    if text is None:
        left_out["*.py"] = "git did not print in time what differs from the commit"
        return "", changed
    kept, room = list[str](), _LARGEST
    for chunk in sorted(re.split(r"^(?=diff --git )", text, flags=re.MULTILINE)[1:], key=len):
        head = chunk.partition("\n")[0]
        name = next((each for each in wanted if head == f"diff --git a/{each} b/{each}"), head)
        reason = _reason_against(name, chunk)
        if reason is None and re.search(r"^(Binary files |[+-]Subproject commit )", chunk, re.MULTILINE):
            reason = "it has changed, and is no text"
        if reason is None and len(chunk) > room:
            reason = _TOO_LARGE
        if reason is None:
            kept.append(chunk)
            room -= len(chunk)
        else:
            left_out[name] = reason
    return "".join(sorted(kept)), changed


def _admit(path: Path, name: str, left_out: dict[str, str], room: int) -> str | None:
    """Return the text of a file; note why if it has to be left out."""
    try:
        text = path.read_bytes().decode(errors="surrogateescape") if path.stat().st_size <= room else None
    except OSError as error:
        left_out[name] = f"it cannot be read: {error.strerror}"
        return None
    if reason := _TOO_LARGE if text is None else _reason_against(name, text):
        left_out[name] = reason
        return None
    left_out.pop(name, None)  # which no commit has
    return text


def _reason_against(name: str, text: str) -> str | None:
    """Return why a text must not be recorded, in words."""
    if _SECRET_FILE.search(name):
        return "its name is that of a file with secrets"
    if _has_secret(text, is_code=name.endswith(".py")):
        return "it has something that looks like a secret"
    return "it is not in UTF-8" if re.search("[\udc80-\udcff]", text) else None  # bytes that were escaped


def _without_user(address: str) -> str | None:
    """Return the address of a repository without what logs in there; ``None`` if it is none of a form that is known."""
    parts = urlsplit(address) if re.match(r"(https?|ssh|git)://", address) else None
    if parts is not None and parts.hostname:
        user = "git@" if parts.scheme == "ssh" else ""
        address = urlunsplit((parts.scheme, f"{user}{parts.netloc.rpartition('@')[2]}", parts.path, "", ""))
    elif not re.fullmatch(r"(?:git@[\w.-]+:)?[\w./~+-]+", address):
        return None
    return None if _has_secret(address) or not address else address


# --- the distributions ---


def distributions() -> dict[str, str]:
    """Return the versions of all installed distributions by name, with where one is from that no index has.

    The names of their folders tell them: to read the metadata of hundreds would take a tenth of a second.
    """
    versions: dict[str, str] = {}
    for path in sys.path:
        with suppress(OSError):
            for entry in sorted(entry for entry in os.listdir(path or ".") if entry.endswith(".dist-info")):
                name, dash, version = entry.removesuffix(".dist-info").partition("-")
                name = re.sub(r"[-_.]+", "-", name).lower()
                if dash and name not in versions:
                    versions[name] = " @ ".join([version, *_origin(os.path.join(path, entry, "direct_url.json"))])
    return dict(sorted(versions.items()))


def _origin(path: str) -> Iterator[str]:
    """Yield the address that a distribution was installed from, if it was from one."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        with open(path, encoding="utf-8") as file:
            told = json.load(file)
        if told["url"].startswith("file:"):
            if os.path.exists(unquote(urlsplit(told["url"]).path)):  # that of a distribution of Conda was on another machine
                yield told["url"]
            return
        address = _without_user(told["url"]) or LEFT_OUT
        vcs = told.get("vcs_info")
        below = f"#subdirectory={told['subdirectory']}" if "subdirectory" in told else ""
        yield f"{vcs['vcs']}+{address}@{vcs['commit_id']}{below}" if vcs else f"{address}{below}"
