"""The scripts of a page of docs/migration/, to be run in processes of their own."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import forked

DOCS = Path(__file__).parents[2] / "docs"


def script_of(page, *headings):
    """The blocks of Python below these headings, one after the other."""
    parts = re.split(r"^#+ (.*)\n", (DOCS / page).read_text(), flags=re.MULTILINE)
    below = dict(zip(parts[1::2], parts[2::2], strict=True))
    blocks = [
        re.findall(r"^```(?:python|\{code-block\} python)\n(.*?)^```$", below[name], re.DOTALL | re.MULTILINE)
        for name in headings
    ]
    assert all(blocks), headings
    return "\n".join(block for found in blocks for block in found)


def run_script(folder, script, python=sys.executable, **environment):
    """Run it in the folder, which is made; returns the folder."""
    folder.mkdir()
    (folder / "script.py").write_text(script)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **environment}
    with contextlib.chdir(folder):
        if python == sys.executable:
            done = forked.run(["script.py"], env=environment)
        else:
            command = [python, "script.py"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return folder
