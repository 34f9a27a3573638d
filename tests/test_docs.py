"""What the pages of docs/ show runs as it stands."""

import ast
import os
import re
import sys
import types
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks_of(page):
    """The blocks of Python of a page, each with the number of its first line."""
    text = page.read_text()
    found = ((text[: block.start(2)].count("\n") + 1, *block.groups()) for block in FENCE.finditer(text))
    return [(line, code) for line, language, code in found if language.startswith("python")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_the_python_of_a_page_runs_as_it_stands(page, tmp_path, monkeypatch):
    """All its blocks, one after the other in one module, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    for line, code in blocks_of(page):
        exec(compile("\n" * (line - 1) + code, os.fspath(page), "exec"), vars(module))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_no_block_of_python_is_left_out(page):
    """Each begins with ```python and nothing else, and ends."""
    text = page.read_text()
    assert len(re.findall(r"^[ \t]*```", text, re.MULTILINE)) == 2 * len(FENCE.findall(text))
    begun = re.findall(r"^[ \t]*```[ \t]*py.*$", text, re.MULTILINE | re.IGNORECASE)
    assert begun == ["```python"] * len(blocks_of(page))


@pytest.mark.parametrize("part", ["A dataset", "An updater", "A trigger", "An extension", "A callback", "An iterator"])
def test_each_part_of_ones_own_is_written_in_15_lines_and_proved(part):
    """Of code: neither blank nor of a docstring. The block after the definition asserts or checks."""
    page = DOCS / "own-parts.md"
    begin = page.read_text().split(f"## {part}\n")[0].count("\n")
    (_, definition), (_, proof) = [block for block in blocks_of(page) if block[0] > begin][:2]
    (node,) = ast.parse(definition).body
    docstring = node.body[0]
    assert isinstance(docstring.value, ast.Constant)
    lines = definition.splitlines()
    del lines[docstring.lineno - 1 : docstring.end_lineno]
    assert len([line for line in lines if line.strip()]) <= 15
    assert re.search(r"\bcheck_\w+\(|\bassert ", proof)
