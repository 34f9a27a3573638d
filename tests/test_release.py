"""A release: one version in all places, a clean commit, files that were tried, and a workflow that keeps no token."""

import io
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2027-01-31\n\n### Added\n\n- All of it.\n"
CITATION = "version: 1.2.0\ndate-released: 2027-01-31\n"


@pytest.fixture
def repository(tmp_path):
    """A commit that may be released but for its files, which `make wheel` builds."""
    (tmp_path / "src" / "chainring").mkdir(parents=True)
    (tmp_path / "src" / "chainring" / "_version.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "CITATION.cff").write_text(CITATION)
    (tmp_path / ".gitignore").write_text("dist/\n")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(repository, *arguments):
    identity = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=repository, check=True, capture_output=True)


def commit(repository):
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "Release 1.2.0")


def build(repository):
    """The files of the version, with what the index reads of them."""
    fields = ["Metadata-Version: 2.4", "Name: chainring", "Version: 1.2.0", "Description-Content-Type: text/markdown"]
    metadata = "\n".join([*fields, "", "# Chainring", ""])
    dist = repository / "dist"
    dist.mkdir()
    with zipfile.ZipFile(dist / "chainring-1.2.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("chainring-1.2.0.dist-info/METADATA", metadata)
        wheel.writestr("chainring-1.2.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("chainring-1.2.0.dist-info/RECORD", "")
    with tarfile.open(dist / "chainring-1.2.0.tar.gz", "w:gz") as sdist:
        for name in ("PKG-INFO", "README.md"):
            entry = tarfile.TarInfo(f"chainring-1.2.0/{name}")
            entry.size = len(metadata)
            sdist.addfile(entry, io.BytesIO(metadata.encode()))


def release(repository, *arguments):
    """The finished program."""
    return subprocess.run(
        [sys.executable, ROOT / ".ci" / "release", *arguments], cwd=repository, capture_output=True, text=True, check=False
    )


def test_a_commit_that_is_prepared_may_be_released_and_nothing_is_done(repository):
    """The commands that would release it, and the files with their checksums."""
    build(repository)
    done = release(repository)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1.2.0 may be released from" in done.stdout
    assert "Nothing was tagged, pushed or uploaded." in done.stdout
    assert "git tag v1.2.0" in done.stdout
    assert len(re.findall(r"chainring-1\.2\.0\S+  \d+ bytes  sha256 [0-9a-f]{64}", done.stdout)) == 2
    tags = subprocess.run(["git", "tag"], cwd=repository, capture_output=True, text=True, check=True).stdout
    assert tags == ""


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("CHANGELOG.md", "## [Unreleased]\n", "it has none of a release: write '## [1.2.0] - YYYY-MM-DD'"),
        ("CHANGELOG.md", CHANGELOG.replace("1.2.0", "1.1.0"), "its newest is 1.1.0: write '## [1.2.0] - YYYY-MM-DD'"),
        ("CHANGELOG.md", CHANGELOG.replace("d]\n", "d]\n\n- More.\n", 1), "put them below the heading of the version"),
        ("CITATION.cff", CITATION.replace("1.2", "1.1"), "is of the version 1.2.0, and says 1.1.0: write it there too"),
        ("CITATION.cff", "version: 1.2.0\n", "2027-01-31, and says none: write date-released: 2027-01-31"),
    ],
)
def test_texts_of_another_version_are_refused(repository, path, text, problem):
    """With the line to write."""
    (repository / path).write_text(text)
    commit(repository)
    done = release(repository)
    assert done.returncode == 1
    assert problem in done.stdout


def test_what_is_not_committed_is_refused(repository):
    """Also a file that git does not know."""
    (repository / "left.py").touch()
    done = release(repository)
    assert done.returncode == 1
    assert "a release is a commit, and 1 files differ from it: commit or remove them" in done.stdout


def test_a_tag_of_another_version_or_commit_is_refused(repository):
    """A version is released once."""
    assert "the tag of the version 1.2.0 is v1.2.0, got v1.2: tag that" in release(repository, "v1.2").stdout
    git(repository, "tag", "v1.2.0")
    assert "is at another commit" not in release(repository).stdout
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "Later")
    assert "the tag v1.2.0 is at another commit: a version is released once" in release(repository).stdout


def test_files_of_another_version_are_refused(repository):
    """And missing ones."""
    remedy = "run make wheel, which builds and tries them"
    assert remedy in release(repository).stdout
    (repository / "dist").mkdir()
    (repository / "dist" / "chainring-1.1.0.tar.gz").touch()
    assert remedy in release(repository).stdout
    shutil.rmtree(repository / "dist")


def test_files_that_the_index_would_not_show_are_refused(repository):
    """With what `twine check --strict` says of them."""
    build(repository)
    with zipfile.ZipFile(repository / "dist" / "chainring-1.2.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("chainring-1.2.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    assert "twine check --strict fails" in release(repository).stdout


def test_the_workflow_publishes_tags_without_a_token():
    """PyPI trusts its environment; only the job that uploads may ask for an identity, and no job has a secret."""
    text = WORKFLOW.read_text()
    workflow = yaml.safe_load(text)
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML reads "on" as a truth value
    assert "secrets." not in text
    assert "password" not in text
    assert workflow["permissions"] == {}
    jobs = workflow["jobs"]
    assert jobs["build"]["permissions"] == {"contents": "read"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["environment"]["name"] == "pypi"
    assert jobs["publish"]["needs"] == "attest"
    assert jobs["publish"]["steps"][-1]["with"] == {"attestations": True}


def test_what_is_published_says_where_it_was_built_and_what_it_needs():
    """Before the upload, each file of the build is attested twice: its provenance, and the packages it is installed with."""
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    assert jobs["attest"]["needs"] == "build"
    assert jobs["attest"]["permissions"] == {"attestations": "write", "id-token": "write"}
    *_, provenance, packages = (step["with"] for step in jobs["attest"]["steps"])
    assert provenance == {"subject-path": "files/dist/*"}
    assert packages == {**provenance, "sbom-path": "files/sbom/sbom.cdx.json"}
    assert {"name": "sbom", "path": "build/sbom.cdx.json", "if-no-files-found": "error"} in [
        step.get("with") for step in jobs["build"]["steps"]
    ]


def test_the_workflow_calls_a_target_of_the_makefile():
    """The one that contributors call before they tag, and then the program that lists what the wheel needs."""
    commands = [step["run"] for step in yaml.safe_load(WORKFLOW.read_text())["jobs"]["build"]["steps"] if "run" in step]
    assert [command.split()[:2] for command in commands] == [["make", "release"], [".ci/sbom", "build/sbom.cdx.json"]]
    assert re.search(r"^release: wheel", (ROOT / "Makefile").read_text(), re.MULTILINE)
