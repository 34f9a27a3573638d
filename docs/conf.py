"""How `make docs` makes the pages: furo, MyST, the reference from the docstrings. Warnings are errors."""

from __future__ import annotations

import re
from typing import Any

from docutils.nodes import Element
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

import chainring
from chainring.training.extensions import dump_graph, snapshot

# Classes that are called as functions: under the names of the classes they would be aliases.
dump_graph.__name__, snapshot.__name__ = "dump_graph", "snapshot"

project = "Chainring"
copyright = "The Chainring developers"  # noqa: A001 - Sphinx's name for it
release = version = chainring.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]

html_theme = "furo"
html_title = "Chainring"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["chainring.css"]
highlight_language = "none"  # what is printed is no Python
pygments_style = "friendly"
pygments_dark_style = "monokai"

myst_heading_anchors = 3

default_role = "py:obj"  # `Trainer` in a docstring leads to it
autodoc_default_options = {
    "members": True,
    "inherited-members": "Module,Extension,Updater,Iterator,Trigger,Writer,DatasetMixin,Sequence,BaseException",
}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autosummary_generate = False  # a table stands above what it lists, on the same page
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
nitpick_ignore_regex = [
    ("py:.*", r"(torch|nn|Tensor|Module|Optimizer|np|numpy|ndarray|os|pathlib|collections|contextlib)\b.*"),
    ("py:class", r"chainring\.training\.extensions\.snapshot\.Snapshot"),  # made by the function of that name
    (
        "py:class",
        r"(.*\.)?(Entry|Filename|PathLike|RecordWriter|Statistic|Store|TextStream|TriggerLike)",
    ),  # types of annotations, not public names
]


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


def copy_linked_files(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turn a link to a file outside docs/, which leads there on a forge, into one to a copy of it in the pages."""
    up = "../" * (docname.count("/") + 1)
    source[0] = re.sub(rf"\]\(({re.escape(up)}[^)#]+)\)", r"](path:\1)", source[0])


def setup(app: Sphinx) -> None:
    """Connect the functions above to Sphinx."""
    app.connect("missing-reference", find_by_its_name)
    app.connect("source-read", copy_linked_files)
