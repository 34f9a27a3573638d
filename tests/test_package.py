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


def test_ci_calls_targets_of_the_makefile():
    """Those of .ci/run, for every Python that the metadata name."""
    workflow = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    matrix = job["strategy"]["matrix"]
    steps = "\n".join(step.get("run", "") for step in job["steps"])
    called = set(re.findall(r"make (\w+)", steps)) | set(matrix["command"])
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert called <= targets
    assert called == set(re.findall(r"^make (\w+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))
    named = [c.rpartition(" :: ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert matrix["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"


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
    installed = {name.match(line).group() for line in PYPROJECT["dependency-groups"]["dev"] + extras["examples"]}
    wanted = {name.match(line).group() for lines in extras.values() for line in lines}
    assert wanted <= installed


def test_the_map_for_contributors_shows_every_room():
    """The packages and modules of the rows, from top to bottom."""
    picture = (ROOT / "docs" / "house.svg").read_text()
    shown = [name.removesuffix("/").replace("/", ".") for name in re.findall(r'font-weight="600">([^<]+)<', picture)]
    assert shown == [name for row in ROWS for name in row.split() if name != "_version"]
