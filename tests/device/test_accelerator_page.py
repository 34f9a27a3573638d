"""``benchmarks/accelerator.py --check`` on the stand-in: it runs to its end, and its page has every answer."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import stand_in

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "accelerator.py"


@pytest.mark.skipif(stand_in.NAME != "cuda", reason="it takes the first accelerator, as others would")
def test_the_page_says_what_holds_on_the_device(tmp_path):
    """But for the speed, which has no limit here."""
    page = tmp_path / "page.md"
    command = [sys.executable, str(PROGRAM), "--check", "--small", "--rounds", "1", "--epochs", "1", "--slack", "1000"]
    done = subprocess.run([*command, "--page", str(page)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    text = page.read_text()
    assert "| name | a stand-in |" in text
    assert len(re.findall(r"^\|.*\| yes \|$", text, re.MULTILINE)) == 5, text
    assert "0 waits in 100 iterations" in text
    assert "## Over their limits\n\n- nothing" in text
