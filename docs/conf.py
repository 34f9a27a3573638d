"""How `make docs` makes the pages: furo, MyST, the reference from the docstrings. Warnings are errors."""

from __future__ import annotations

import gc
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from docutils.nodes import Element, paragraph
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode
from sphinx.util.typing import stringify_annotation

import chainring
from chainring.training.extensions import dump_graph, snapshot

gc.disable()  # of the time of a build it takes two fifths, for some 600 MB

# Classes that are called as functions: under the names of the classes they would be aliases.
dump_graph.__name__, snapshot.__name__ = "dump_graph", "snapshot"
# PyTorch's documents have these classes where users import them.
torch.nn.Module.__module__, torch.optim.Optimizer.__module__ = "torch.nn", "torch.optim"

project = "Chainring"
copyright = "The Chainring developers"  # noqa: A001 - Sphinx's name for it
release = version = chainring.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
]

html_theme = "furo"
html_title = "Chainring"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["chainring.css"]
highlight_language = "none"  # what is printed is no Python
pygments_style = "default"  # whose comments are dark enough to be read, as not in each style
pygments_dark_style = "monokai"
viewcode_line_numbers = True
copybutton_exclude = ".linenos, .gp, .go"  # neither prompts nor what is printed

# The names of other documents that ours lead to, kept here so that the pages can be built without a network.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", "inventories/python.inv"),
    "numpy": ("https://numpy.org/doc/stable", "inventories/numpy.inv"),
    "torch": ("https://docs.pytorch.org/docs/stable", "inventories/torch.inv"),
}

myst_heading_anchors = 3
exclude_patterns = ["versions-table.md", "pictures/growth-table.md"]  # which pages include

default_role = "py:obj"  # `Trainer` in a docstring leads to it
autodoc_default_options = {
    "members": True,
    "inherited-members": "Module,Extension,Updater,StandardUpdater,BestValue,BestValueTrigger,Iterator,Trigger,Writer,"
    "DatasetMixin,Sequence,BaseException",
}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autosummary_generate = False  # a table stands above what it lists, on the same page
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
# Methods that only Chainring's own objects call, by the class that defines them, and the classes of the reference.
PLUMBING = set(Path(__file__).with_name("plumbing.txt").read_text().split())
MODULES = set(
    re.findall(r"currentmodule:: (\S+)", "".join(page.read_text() for page in Path(__file__).parent.rglob("*.md")))
)
PUBLIC = {thing for name in MODULES for thing in vars(import_module(name)).values() if isinstance(thing, type)}
PUBLIC = {thing for thing in PUBLIC if thing.__module__.startswith("chainring")}
nitpick_ignore_regex = [
    ("py:class", r"nn\.Module|Tensor"),  # of annotations that are not imported at run time
    ("py:class", r"chainring\.training\.extensions\.snapshot\.Snapshot"),  # made by the function of that name
    (
        "py:class",
        r"(.*\.)?(Converter|Dataset|Entry|Filename|Indexed|Loss|Observer|PathLike|Place|RecordWriter|Scheduler|Snapshots|"
        r"Statistic|Store|TextStream|TriggerLike|_E)",
    ),  # types of annotations, not public names
]


def use_public_name(app: Sphinx, env: BuildEnvironment, node: Element, contnode: Element) -> None:
    """Let the private name that NumPy 2.5 has for `NDArray` in annotations lead to the public one."""
    node["reftarget"] = node["reftarget"].replace("numpy._typing._array_like.", "numpy.typing.")


def find_by_its_name(app: Sphinx, env: BuildEnvironment, node: Element, contnode: Element) -> Any:
    """Resolve `Trainer` in a docstring: the public thing of that name is meant, one of the same page first."""
    if node.get("refdomain") != "py":
        return None
    domain: Any = env.get_domain("py")
    found = domain.find_obj(env, None, None, node["reftarget"], None, 1)
    if not found:
        return None
    here = f"{node.get('py:module')}."
    name, entry = min(found, key=lambda each: (not each[0].startswith(here), len(each[0])))
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contnode, name)


def shorten_signature(*args: Any) -> tuple[str | None, str | None]:
    """Put `ArrayLike` and `DTypeLike` in place of the dozen private types that they stand for; show a default as `...`."""
    *_, arguments, returned = args
    for name in ("ArrayLike", "DTypeLike"):
        union = stringify_annotation(getattr(np.typing, name), "smart").removesuffix(" | None")
        arguments = arguments and arguments.replace(union, f"~numpy.typing.{name}").replace("<factory>", "...")
    return arguments, returned


def copy_linked_files(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turn a link to a file outside docs/, which leads there on a forge, into one to a copy of it in the pages."""
    up = "../" * (docname.count("/") + 1)
    source[0] = re.sub(rf"\]\(({re.escape(up)}[^)#]+)\)", r"](path:\1)", source[0])


def leave_out_plumbing(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out what only Chainring's own objects call, and methods that a public base class documents."""
    function = getattr(obj, "fget", obj)
    owner, _, attribute = getattr(function, "__qualname__", "").rpartition(".")
    if what != "class" or not owner or skip:
        return None
    cls = getattr(sys.modules[function.__module__], owner, None)
    documented = any(attribute in vars(base) for base in getattr(cls, "__mro__", ())[1:] if base in PUBLIC)
    plumbing = any(f"{base.__name__}.{attribute}" in PLUMBING for base in getattr(cls, "__mro__", ()))
    return True if documented or plumbing else None


def name_base(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Say in the text of a class at which public class its inherited methods are documented."""
    base = next((base for base in getattr(obj, "__mro__", ())[1:] if base in PUBLIC), None)
    if what == "class" and base is not None:
        lines += ["", f"It has the methods of `{base.__name__}` too.", ""]


def write_llms_txt(app: Sphinx, exception: Exception | None) -> None:
    """List the pages with their first paragraphs in `llms.txt`, as https://llmstxt.org describes it."""
    if exception or app.builder.name != "html":
        return
    env = app.env
    lines = [f"# {project}", "", f"> {summary_of(env, 'index')}"]
    sections: dict[str, list[str]] = {}
    for page in pages_in_order(env, "index"):
        section = page.partition("/")[0].capitalize() if "/" in page else "Documents"
        sections.setdefault(section, []).append(
            f"- [{env.titles[page].astext()}]({app.builder.get_target_uri(page)}): {summary_of(env, page)}"
        )
    for name, links in sections.items():
        lines += ["", f"## {name}", "", *links]
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n")


def pages_in_order(env: BuildEnvironment, page: str) -> list[str]:
    """Return the pages below a page, as the tables of contents list them."""
    below = env.toctree_includes.get(page, [])
    return [each for child in below for each in (child, *pages_in_order(env, child))]


def summary_of(env: BuildEnvironment, page: str) -> str:
    """Return the first paragraph of a page as plain text in one line."""
    first = next(iter(env.get_doctree(page).findall(paragraph)), None)
    return " ".join(first.astext().split()) if first is not None else ""


def setup(app: Sphinx) -> None:
    """Connect the functions above to Sphinx."""
    app.connect("missing-reference", use_public_name, priority=400)  # before the inventories are looked into
    app.connect("missing-reference", find_by_its_name)
    app.connect("autodoc-skip-member", leave_out_plumbing)
    app.connect("autodoc-process-docstring", name_base, priority=400)  # before its sections are parsed
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("source-read", copy_linked_files)
    app.connect("build-finished", write_llms_txt)
