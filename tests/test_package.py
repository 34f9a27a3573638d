"""What comes with the code: metadata, the files of the forge, and that they name what is there."""

import re
import tomllib
from pathlib import Path

import pytest
import readme_renderer.markdown
import yaml

import chainring
from test_architecture import ROWS

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
GITHUB = ROOT / ".github"
LINK = re.compile(r"\]\(([^)#:]+)\)")
LINKED = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md"]


def test_the_citation_is_of_this_version():
    """With the fields that the format requires, and the licence and name of the package."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}
    assert (citation["version"], citation["license"]) == (chainring.__version__, PROJECT["license"])
    assert citation["authors"] == PROJECT["authors"]


def test_the_changelog_has_the_changes_since_the_last_release_on_top():
    """And below each release its number and day."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])


def test_the_notes_of_a_release_begin_with_a_screen_of_what_matters():
    """Above all changes: a sentence, at most ten points, and no more lines than a window has."""
    for release in re.split(r"^## .*$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]:
        top = release.split("\n### ")[0].strip().splitlines()
        assert len(top) <= 35
        assert not top or not top[0].startswith("- ")
        assert sum(line.startswith("- ") for line in top) <= 10


def test_ci_calls_targets_of_the_makefile():
    """Those of .ci/run, for every Python that the metadata name."""
    workflow = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())
    job = workflow["jobs"]["test"]
    matrix = job["strategy"]["matrix"]
    steps = "\n".join(step.get("run", "") for step in job["steps"])
    called = set(re.findall(r"make (\w+)", steps)) | set(matrix["command"])
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert called <= targets
    assert called == set(re.findall(r"^make (\w+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))
    named = [c.rpartition(" :: ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert matrix["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_the_page_on_support_has_the_versions_of_the_metadata():
    """Those of Python from the oldest to the newest that is named, and the oldest of PyTorch and NumPy."""
    page = (ROOT / "docs" / "support.md").read_text()
    named = [c.rpartition(" :: ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert f"| Python | {named[0]} to {named[-1]} |" in page
    oldest = dict(line.split(">=") for line in PROJECT["dependencies"])
    assert f"| PyTorch | {oldest['torch']} to the newest |" in page
    assert f"| NumPy | {oldest['numpy']} and 2 |" in page


SYSTEMS = {"ubuntu": "POSIX :: Linux", "macos": "MacOS", "windows": "Microsoft :: Windows"}


def test_the_metadata_name_the_systems_on_which_ci_must_pass():
    """One on which it may fail is not named."""
    jobs = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]
    system = jobs["system"]
    tried = [jobs["test"]["runs-on"], *system["strategy"]["matrix"]["system"]]
    must = {SYSTEMS[each.partition("-")[0]] for each in tried if each not in system["continue-on-error"]}
    prefix = "Operating System :: "
    assert {c.removeprefix(prefix) for c in PROJECT["classifiers"] if c.startswith(prefix)} == must
    assert "Windows is not supported" in (ROOT / "docs" / "start.md").read_text() or SYSTEMS["windows"] in must


def test_the_versions_of_pytorch_in_ci_begin_with_the_oldest_that_is_required():
    """Each is one that `make compat` knows; the last two are the newest and the next."""
    workflow = yaml.safe_load((GITHUB / "workflows" / "compat.yml").read_text())
    versions = workflow["jobs"]["compat"]["strategy"]["matrix"]["torch"]
    known = re.findall(r'^    "([\w.]+)": \[', (ROOT / "tests" / "compat" / "run.py").read_text(), re.MULTILINE)
    assert versions == known
    assert f"torch>={versions[0]}" in PROJECT["dependencies"]
    assert versions[-2:] == ["newest", "nightly"]


@pytest.mark.parametrize("workflow", sorted((GITHUB / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_every_action_is_pinned(workflow):
    """To a commit, with its version beside it, for a tag could be moved to other code; one action has one version."""
    used = re.findall(r"uses: (.*)", workflow.read_text())
    assert all(re.fullmatch(r"[\w-]+/[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", each) for each in used)
    everywhere = set(re.findall(r"uses: (.*)", "".join(path.read_text() for path in (GITHUB / "workflows").glob("*.yml"))))
    assert len({each.partition("@")[0] for each in everywhere}) == len(everywhere)


def test_the_hosted_documents_are_made_by_the_command_that_contributors_use():
    """With warnings being errors, into the folder that the service names."""
    commands = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())["build"]["jobs"]["build"]["html"]
    (ours,) = re.findall(r"^\t\$\(BIN\)/(python -m sphinx .*) build/docs$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert commands == [f"{ours} $READTHEDOCS_OUTPUT/html"]
    assert PROJECT["urls"]["Documentation"] in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_a_form_for_issues_asks_for_what_is_needed(name):
    """Each field has a name of its own and says what belongs there; the command line that it names is there."""
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert form.keys() >= {"name", "description", "body"}
    identifiers = [field["id"] for field in form["body"]]
    assert len(identifiers) == len(set(identifiers))
    assert all(field["attributes"]["label"] for field in form["body"])


def test_a_bug_comes_with_what_was_saved():
    """The versions, from the command."""
    assert "`chainring inspect result`" in (GITHUB / "ISSUE_TEMPLATE" / "bug.yml").read_text()


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_to_files_that_are_there(page):
    """Those to the repository's own."""
    assert all((ROOT / target).exists() for target in LINK.findall((ROOT / page).read_text()))


def test_the_readme_is_whole_on_the_page_of_an_index():
    """Rendered and cleaned as there: its tables, code and pictures remain, and whatever it leads to has an address."""
    shown = readme_renderer.markdown.render((ROOT / "README.md").read_text())
    assert re.findall(r'(?:href|src|srcset)="(?!https://|#user-content-)([^"]*)"', shown) == []
    pictures = re.findall(r'<img src="https://raw.githubusercontent.com/chainring/chainring/main/(docs/[^"]+)"', shown)
    assert [(ROOT / name).exists() for name in pictures] == [True, True]
    assert (shown.count("<table>"), shown.count("<pre")) == (2, 4)


def test_every_extra_is_installed_for_the_tests():
    """So that no test is left out where a contributor has installed what the commands install."""
    extras = PROJECT["optional-dependencies"]
    name = re.compile(r"[\w-]+")
    lines = [line for line in PYPROJECT["dependency-groups"]["dev"] if isinstance(line, str)] + extras["examples"]
    installed = {name.match(line).group() for line in lines}
    wanted = {name.match(line).group() for lines in extras.values() for line in lines}
    assert wanted <= installed


def test_the_map_for_contributors_shows_every_room():
    """The packages and modules of the rows, from top to bottom."""
    picture = (ROOT / "docs" / "house.svg").read_text()
    shown = [name.removesuffix("/").replace("/", ".") for name in re.findall(r'font-weight="600">([^<]+)<', picture)]
    assert shown == [name for row in ROWS for name in row.split() if name != "_version"]
