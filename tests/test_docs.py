"""What the pages of docs/ show runs as it stands, leads somewhere, and leaves no public name out."""

import ast
import importlib
import inspect
import json
import os
import re
import sys
import types
import zlib
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest
import snowballstemmer
from spellchecker import SpellChecker

import forked
from test_public_api import PACKAGES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    {*DOCS.rglob("*.md")} - {DOCS / "versions-table.md", DOCS / "pictures" / "growth-table.md"}
)  # which others include
MIGRATION = sorted(page for page in (DOCS / "migration").glob("*.md") if page.name != "index.md")
SKILL = ROOT / "src" / "chainring" / "SKILL.md"
TEXTS = sorted([*PAGES, SKILL, *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")])
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BEFORE = "{code-block} python"
LIBRARIES = {"hugging-face": "transformers", "nanogpt": "torch", "pfn-extras": "pytorch_pfn_extras", "torchvision": "torch"}
"""Of pages of migration: what their script before imports; of nanoGPT and torchvision these are loops."""
RUNS_BEFORE = {"accelerate", "hugging-face", "nanogpt", "torchvision"}
"""Pages of migration whose script before is run too, because its library is there wherever the tests are."""


def blocks_of(page):
    """The blocks of Python of a page, each with the number of its first line."""
    text = page.read_text()
    found = ((text[: block.start(2)].count("\n") + 1, *block.groups()) for block in FENCE.finditer(text))
    return [(line, code) for line, language, code in found if language.startswith("python")]


@pytest.fixture
def _services_keep_to_themselves(tmp_path, monkeypatch):
    """W&B, on the page of logs, says nothing and leaves no files elsewhere; Accelerate begins again on each page."""
    for name, value in {"MODE": "offline", "SILENT": "true", "CONSOLE": "off"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    for name in ("CONFIG_DIR", "CACHE_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / "own"))
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()
    if "accelerate" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)  # one for the process


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")  # of MLflow's own tables
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torchdata
@pytest.mark.filterwarnings("ignore:::(lightning|transformers|accelerate)\\.")  # on loaders, and on what they import
@pytest.mark.usefixtures("_services_keep_to_themselves")
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
    """Each begins with ```python and nothing else, and ends; a script for another library is the exception."""
    text = page.read_text()
    assert len(re.findall(r"^[ \t]*```", text, re.MULTILINE)) == 2 * len(FENCE.findall(text))
    begun = re.findall(r"^[ \t]*```.*py.*$", text, re.MULTILINE | re.IGNORECASE)
    before = [f"```{BEFORE}"] if page in MIGRATION and page.stem not in RUNS_BEFORE else []
    assert sorted(begun) == sorted(["```python"] * len(blocks_of(page)) + before)


@pytest.mark.parametrize("page", MIGRATION, ids=lambda page: page.stem)
def test_a_page_of_migration_has_a_table_a_script_before_and_one_after(page):
    """The script before is of that library, and is Python; the one after trains with Chainring."""
    text = page.read_text()
    assert re.search(r"^\| .* \| Chainring \|\n\|---\|---\|$", text, re.MULTILINE)
    before, after = (FENCE.search(text.split(f"## {heading}\n")[1]) for heading in ("Before", "After"))
    assert before.group(1) == ("python" if page.stem in RUNS_BEFORE else BEFORE)
    begun = text.split("## After\n")[0]
    scripts = [code for language, code in FENCE.findall(begun) if language in ("python", BEFORE)]
    library = LIBRARIES.get(page.stem, page.stem)
    assert library in {name.partition(".")[0] for code in scripts for name in imported(code)}
    assert "trainer.run()" in after.group(2)


def imported(code):
    """The modules that a program imports."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


@pytest.mark.parametrize(
    "part", ["A dataset", "An updater", "A module", "A trigger", "An extension", "A callback", "An iterator"]
)
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


@pytest.mark.parametrize("section", ["From Lightning", "From Hugging Face's Trainer", "From a loop of Accelerate"])
def test_a_run_of_another_library_is_continued_after_at_most_ten_changed_lines(section):
    """The second block of its section, imports included, in place of the line that has begun the run."""
    page = DOCS / "bring-your-run.md"
    begin = page.read_text().split(f"## {section}\n")[0].count("\n")
    _, (_, continued) = [block for block in blocks_of(page) if block[0] > begin][:2]
    assert len([line for line in continued.splitlines() if line.strip()]) <= 10
    assert "serializers.load(" in continued
    assert "trainer.run()" in continued


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The pages as `make docs` makes them, and whatever was said about them."""
    folder = tmp_path_factory.mktemp("docs")
    done = forked.run(["-m", "sphinx", "-q", "-n", "--keep-going", DOCS, folder])
    return folder, done.stdout + done.stderr


def test_the_documents_are_made_without_a_warning(built):
    """References that lead nowhere are warnings too."""
    assert built[1] == ""


def test_public_objects_and_those_of_other_libraries_are_links(built):
    """A class leads to its source and its base, and the types of its arguments to the documents of Python and PyTorch."""
    page = (built[0] / "reference" / "training.html").read_text()
    assert re.search(r'It has the methods of <a [^>]*href="#chainring\.training\.StandardUpdater"', page)
    assert 'href="../_modules/chainring/training/trainer.html#Trainer"' in page
    assert (built[0] / "_modules/chainring/training/trainer.html").exists()
    assert 'href="https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module"' in page
    assert 'href="https://docs.python.org/3/library/collections.abc.html#collections.abc.Mapping"' in page


def test_code_has_a_button_that_copies_it(built):
    """Its script is on each page."""
    assert all("copybutton.js" in (built[0] / page).read_text() for page in ("index.html", "reference/training.html"))


def test_a_file_for_language_models_lists_every_page_with_a_summary(built):
    """`llms.txt` has a title, a quoted summary, and sections of links, as https://llmstxt.org describes it."""
    title, _, summary, *rest = (built[0] / "llms.txt").read_text().splitlines()
    assert title == "# Chainring"
    assert re.fullmatch(r"> .*PyTorch.*", summary)
    links = [re.fullmatch(r"- \[[^]]+\]\((.+)\): (.+)", line) for line in rest if line and not line.startswith("## ")]
    assert all(links)
    pages = {page.relative_to(DOCS).with_suffix(".html").as_posix() for page in PAGES}
    assert {link[1] for link in links} == pages - {"index.html"}
    assert [link[1] for link in links if link[2].endswith(":") or len(link[2]) < 20] == []


@pytest.mark.parametrize(
    "words",
    [
        "mixed precision", "checkpoint", "gradient accumulation", "gpu", "learning rate", "early stopping",
        "wandb", "torchrun", "slurm", "nan", "dataloader", "ema", "resume", "distributeddataparallel", "tensorboard",
    ],
)  # fmt: skip
def test_the_search_finds_what_users_look_for(words, built):
    """Each word, by its stem, is in the index of the search, and one page at least has them all."""
    text = (built[0] / "searchindex.js").read_text()
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])
    stem = snowballstemmer.stemmer("english").stemWord

    def pages_with(word):
        found = [index[part].get(stem(word), []) for part in ("terms", "titleterms")]
        return {page for each in found for page in ([each] if isinstance(each, int) else each)}

    assert set.intersection(*map(pages_with, words.split()))


def documented(built):
    """The names of Python in the inventory that Sphinx writes beside the pages."""
    *_, packed = (built[0] / "objects.inv").read_bytes().split(b"\n", 4)
    lines = zlib.decompress(packed).decode().splitlines()
    return {line.split()[0] for line in lines if line.split()[1].startswith("py:")}


def plumbing():
    """The methods that only Chainring's own objects call, as `Class.method` of the class that defines them."""
    return set((DOCS / "plumbing.txt").read_text().split())


def is_plumbing(cls, name):
    return any(f"{base.__name__}.{name}" in plumbing() for base in cls.__mro__)


def test_the_reference_is_without_plumbing(built):
    """Neither a method that only Chainring's own objects call, nor one that a public base class has documented."""
    public = {f"{module}.{name}": thing for module in PACKAGES for name, thing in names_of(module) if inspect.isclass(thing)}
    shown = [
        (public[path], name) for path, _, name in (each.rpartition(".") for each in documented(built)) if path in public
    ]
    methods = [(cls, name) for cls, name in shown if inspect.isfunction(getattr(cls, name, None))]
    assert not [(cls, name) for cls, name in methods if is_plumbing(cls, name)]
    bases = set(public.values())
    assert not [(cls, name) for cls, name in methods if any(name in vars(base) for base in cls.__mro__[1:] if base in bases)]


def test_what_is_left_out_of_the_reference_is_there(built):
    """Each line of docs/plumbing.txt is a method or attribute of a class; a page that names one is wrong."""
    classes = {
        base.__name__: base
        for module in PACKAGES for _, thing in names_of(module) if inspect.isclass(thing) for base in thing.__mro__
    }  # fmt: skip
    for owner, _, name in (line.partition(".") for line in sorted(plumbing())):
        assert name in vars(classes[owner]), (owner, name)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_has_every_public_name(package, built):
    """Each name of the package, and each method of its classes that users call, there or at a public base."""
    there = documented(built)
    public = {thing: f"{module}.{name}" for module in PACKAGES for name, thing in names_of(module) if inspect.isclass(thing)}
    for name, thing in names_of(package):
        assert f"{package}.{name}" in there
        for method in own_methods(thing) if inspect.isclass(thing) else ():
            paths = [f"{public[base]}.{method}" for base in thing.__mro__ if base in public]
            assert is_plumbing(thing, method) or there.intersection(paths), (name, method)


def names_of(package):
    """What its ``__all__`` lists; of a module that has none, what it defines."""
    module = importlib.import_module(package)
    own = [name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == package and name[0] != "_"]
    return [(name, getattr(module, name)) for name in getattr(module, "__all__", own)]


def own_methods(thing):
    methods = inspect.getmembers(thing, inspect.isfunction)
    return [name for name, method in methods if name[0] != "_" and method.__module__.startswith("chainring")]


@pytest.mark.parametrize(
    "words",
    ["mixed precision", "checkpoint", "gradient accumulation", "GPU", "multi-GPU", "learning rate schedule",
     "early stopping", "logging", "debugging NaN", "fine-tuning", "learning rate finder", "throughput", "MFU", "FLOPs"],
)  # fmt: skip
def test_the_words_of_the_field_are_in_a_heading(words):
    """Whoever looks for one of them finds where it is written about; a checkpoint is said to be called a snapshot here."""
    headings = [
        heading for page in PAGES for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    ]
    assert any(re.search(rf"\b{words}", heading, re.IGNORECASE) for heading in headings)
    assert "A checkpoint of a whole run is called a *snapshot* here." in (DOCS / "resume.md").read_text()


CODE = re.compile(r"`+[^`]+`+|\]\([^)]*\)|<[^>]*>|https?://\S+|\w*[._/\d]\w[\w./]*|-{1,2}\w[\w-]*=?")


def words_of(text):
    """The words of a text, without what stands in it of code, addresses, paths, options and numbers."""
    prose = CODE.sub(" ", FENCE.sub("", text))
    return {re.sub(r"'s?$", "", word) for word in re.findall(r"[^\W\d_][^\W\d_']+", prose)}


@pytest.fixture(scope="module")
def misspelled():
    """A function of a text that returns its words that are neither in the dictionary nor in docs/words.txt."""
    known = set((DOCS / "words.txt").read_text().lower().split())
    dictionary = SpellChecker()
    return lambda text: {word for word in words_of(text) if word.lower() not in known and word not in dictionary}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_words_of_a_page_are_spelled_as_in_a_dictionary(path, misspelled):
    """Names and terms that no dictionary of English has are in docs/words.txt."""
    assert misspelled(path.read_text()) == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_the_words_of_a_docstring_are_spelled_as_in_a_dictionary(package, misspelled):
    """Those of every public class, method and function, without their examples and the names of their arguments."""
    wrong = set()
    for name, thing in names_of(package):
        members = [thing, *(getattr(thing, each) for each in own_methods(thing))] if inspect.isclass(thing) else [thing]
        for member in filter(callable, members):
            text = (inspect.getdoc(member) or "").partition("Example::")[0]
            wrong |= {
                (name, word) for word in misspelled(re.sub(r"^ +\*{0,2}\w+( \(.*?\))?:", "", text, flags=re.MULTILINE))
            }
    assert wrong == set()


def test_no_word_of_the_list_is_unused(misspelled):
    """Each word of docs/words.txt stands in a page or a docstring, and the list is sorted."""
    listed = (DOCS / "words.txt").read_text().split()
    assert listed == sorted(listed, key=str.lower)
    sources = "".join(path.read_text() for path in [*TEXTS, *(ROOT / "src").rglob("*.py")])
    assert [word for word in listed if not re.search(rf"\b{word}", sources, re.IGNORECASE)] == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_addresses_on_the_web_are_well_formed(path):
    """Those of links: https, a host with a name, and no character that an address cannot have. None is fetched."""
    for target in re.findall(r"\]\((\w+:[^)\s]*)\)", FENCE.sub("", path.read_text())):
        parts = urlsplit(target)
        assert parts.scheme == "https", target
        assert re.fullmatch(r"([\w-]+\.)+[a-z]{2,}", parts.netloc), target
        assert re.fullmatch(r"[\w./?=&%#~+:@-]*", target), target


@pytest.mark.parametrize("picture", sorted(DOCS.rglob("*.svg")), ids=lambda path: path.name)
def test_a_picture_has_a_title_stands_on_a_page_and_fetches_nothing(picture):
    """It is XML that a browser can show without a network, and says in words what it shows."""
    root = ElementTree.parse(picture).getroot()
    assert root.find("{http://www.w3.org/2000/svg}title").text
    assert root.get("role") == "img"
    links = [value for each in root.iter() for name, value in each.attrib.items() if name.endswith("href")]
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    assert "url(http" not in picture.read_text()
    assert any(f"{picture.name}" in path.read_text() for path in TEXTS)


def test_the_curves_of_the_page_on_speed_are_of_the_figures_stored_beside_them(tmp_path):
    """What docs/pictures/growth.py draws from growth.json is what the page includes, its table too."""
    forked.run([DOCS / "pictures" / "growth.py", tmp_path]).check_returncode()
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn == {name: (DOCS / "pictures" / name).read_text() for name in drawn}
    page = (DOCS / "speed.md").read_text()
    assert [name for name in drawn if f" pictures/{name}\n" not in page] == []


def anchors_of(path):
    """The fragments by which the headings of a page are known."""
    prose = FENCE.sub("", path.read_text())
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings_that_are_there(path):
    """Those within the repository; nothing is fetched."""
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", path.read_text())):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = path.parent / name if name else path
        assert there.exists(), target
        assert not anchor or anchor in anchors_of(there), target
