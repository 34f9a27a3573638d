"""Errors of mutants.toml, planted in copies of the library, and what the tests on the stand-in and on the CPU find of them.

``python tests/device/mutants.py`` plants one after the other, runs its tests on the stand-in until one fails, and prints a
table; with words, of those in whose description one of them stands. With ``--results FILE`` a run goes on where it ended.

``python tests/device/mutants.py --cpu`` plants all at once that no test on the CPU finds, and runs the tests on the CPU of
the files where they are, or those that are named; all pass, so none of them finds any. Of two in one line, the second is
planted in another copy.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from stand_in.build import library
from stand_in.start import before_torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT = 200  # seconds; tests that hang have found an error
OPTIONS = ["-q", "-p", "no:cacheprovider"]
PASSED, FAILED = 0, 1


def copy_of_source(folder):
    """Return where to import from, which the processes that tests start see too."""
    shutil.copytree(ROOT / "src", folder, dirs_exist_ok=True)
    return os.pathsep.join([folder, str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])


def is_planted(mutant, folder):
    """Replace the text of an error, which must be in its file once; of one that was planted there, return False."""
    path, old = Path("chainring", mutant["file"]), mutant["old"]
    if (number := (ROOT / "src" / path).read_text().count(old)) != 1:
        raise SystemExit(f"{path} has this text {number} times, and a mutant replaces one: {old!r}")
    copy = Path(folder, path)
    text = copy.read_text()
    copy.write_text(text.replace(old, mutant["new"]))
    return text.count(old) == 1


def run_on_stand_in(tests, path, log):
    """Run tests in a child, which need not import torch; return the exit status, or the signal that has ended it."""
    child = os.fork()
    if not child:
        signal.alarm(LIMIT)
        os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
        os.chdir(ROOT)
        os.environ |= {"CHAINRING_STAND_IN": "cuda", "PYTHONPATH": path}
        sys.path[:0] = path.split(os.pathsep)
        os._exit(pytest.main([*OPTIONS, "-x", "-p", "on_device", "--device", "cuda", *tests]))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def find_on_stand_in(mutant):
    """Return the test that finds an error, and after how many seconds; of no error, that none does."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        path = copy_of_source(folder)
        if mutant["file"]:
            is_planted(mutant, folder)
        status = run_on_stand_in(mutant["tests"], path, log)
        log.seek(0)
        text = log.read()
    if status > FAILED:
        raise SystemExit(f"the tests {mutant['tests']} did not run:\n{text}")
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - |$)", text, re.MULTILINE)
    found = "" if status == PASSED else [*failed, f"a test that was ended by signal {-status}"][0]
    return found, round(time.monotonic() - begun, 1)


def run_on_cpu(mutants, tests):
    """Plant all of these at once, and run tests; return those that had no place, since another is there."""
    with tempfile.TemporaryDirectory() as folder:
        path = copy_of_source(folder)
        left = [mutant for mutant in mutants if not is_planted(mutant, folder)]
        print(f"{len(mutants) - len(left)} errors, on the CPU:", flush=True)
        command = [sys.executable, "-m", "pytest", *OPTIONS, *tests]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
    if done.returncode != PASSED:
        raise SystemExit("some are found on the CPU: mark them in mutants.toml by on_cpu = true")
    return left


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="of descriptions; with --cpu, tests")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--results", type=Path)
    asked = parser.parse_args()
    described = tomllib.loads((HERE / "mutants.toml").read_text())
    mutants = described["mutant"]
    if asked.cpu:
        left = [mutant for mutant in mutants if not mutant.get("on_cpu")]
        print(f"{len(mutants) - len(left)} of {len(mutants)} errors are found on the CPU, by their marks")
        tests = asked.words or sorted({test for mutant in left for test in described["cpu"][mutant["file"]]})
        while left:
            left = run_on_cpu(left, tests)
        return
    chosen = [mutant for mutant in mutants if not asked.words or any(word in str(mutant) for word in asked.words)]
    known = json.loads(asked.results.read_text()) if asked.results and asked.results.exists() else {}
    found = 0
    for mutant in chosen:
        key = hashlib.sha256(repr([mutant["file"], mutant["old"], mutant["new"]]).encode()).hexdigest()[:16]
        if key not in known:
            known[key] = find_on_stand_in(mutant)
            if asked.results:
                asked.results.write_text(json.dumps(known, indent=1))
        found += bool(known[key][0])
        print(f"| {mutant['file']} | {mutant['breaks']} | {known[key][0] or 'NOT FOUND'} | {known[key][1]} s |", flush=True)
    print(f"{found} of {len(chosen)} found on the stand-in")


if __name__ == "__main__":
    library()
    before_torch("cuda")
    import pytest
    import torch  # noqa: F401 - once for all

    main()
