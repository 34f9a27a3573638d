"""Files with values in a dtype that came with a later torch than the one at hand, and everything else beside them."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

from chainring import serializers

WITHOUT = """
import importlib, json, pkgutil, sys
import torch
for name in ("float8_e8m0fnu", "float4_e2m1fn_x2"):
    vars(torch).pop(name, None)
import chainring
from chainring import serializers
for module in pkgutil.walk_packages(chainring.__path__, "chainring."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)

found = []
for path in sys.argv[1:]:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("scale", torch.zeros(2))
    try:
        (serializers.load_npz if "npz" in path else serializers.load)(path, model)
    except ValueError as error:
        found.append(str(error))
    else:
        found.append(model.weight.flatten().tolist())
print(json.dumps(found))
"""
"""A program that reads files with a torch that lacks those dtypes, as 2.6 does."""


def save(tmp_path, name, model):
    """Files of three formats, which end in that name."""
    paths = [tmp_path / f"snapshot {name}", tmp_path / f"npz {name}", tmp_path / f"dcp {name}"]
    serializers.save(paths[0], model)
    serializers.save_npz(paths[1], model)
    dcp.save(model.state_dict(), checkpoint_id=paths[2])
    return paths


def read_without(paths):
    done = subprocess.run([sys.executable, "-c", WITHOUT, *paths], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)|TypedStorage is:UserWarning")
@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="writing such a file takes torch 2.7 or newer")
def test_an_older_torch_refuses_the_file_and_names_the_version_that_reads_it(tmp_path):
    """In every format, and only the files that have such a value."""
    model = torch.nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(2))
    plain = save(tmp_path, "plain", model)
    model.scale = model.scale.to(torch.float8_e8m0fnu)
    *sound, first, second, third = read_without(plain[:2] + save(tmp_path, "scaled", model))  # torch.load needs all dtypes
    assert sound == [model.weight.flatten().tolist()] * 2
    for text in (first, second, third):
        assert "float8_e8m0fnu, which came with torch 2.7, and this is " in text
        assert "read it with torch 2.7 or newer" in text
