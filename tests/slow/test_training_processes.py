"""Training and its patches over several processes: going on where another stopped, and one that is killed."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import elementgrad as eg
from tests.support.tagger import PLACES, TOKENS, Tagger


def continued(places, steps, optimizer_state=None):
    torch.manual_seed(0)
    model = Tagger().bfloat16()
    elements = eg.trainable(model, places)
    optimizer = torch.optim.AdamW(elements.parameters(), lr=0.01, weight_decay=0.1)
    if optimizer_state is not None:
        optimizer.load_state_dict(optimizer_state)
    for _ in range(steps):
        optimizer.zero_grad()
        model(TOKENS).float().square().mean().backward()
        optimizer.step()
    return elements, optimizer


def test_resuming_in_another_process_is_exact(tmp_path):
    half, optimizer = continued(PLACES, 5)
    half.save(tmp_path / "half.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "half.pt")
    script = """
        import sys, torch
        from tests.slow.test_training_processes import continued
        elements, _ = continued("half.safetensors", 5, torch.load("half.pt"))
        elements.save("rest.safetensors")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    path = os.pathsep.join([os.path.abspath(path) for path in sys.path if path] + [os.getcwd()])
    subprocess.run(command, check=True, timeout=300, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path})
    whole, _ = continued(PLACES, 10)
    whole.save(tmp_path / "whole.safetensors")
    assert eg.inspect(tmp_path / "rest.safetensors") == eg.inspect(tmp_path / "whole.safetensors")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_killed_while_it_saves_leaves_the_old_patch_or_the_new(tmp_path):
    """200 kills; what they leave beside the patch is removed by the first write after an hour."""
    command = [sys.executable, "-m", "tests.support.killed", str(tmp_path), "200"]
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root)])
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert min(report["found"].values()) > 0
    assert report["left"] > 0  # kills that came in the midst of a save
    left = [path for path in tmp_path.iterdir() if path.name != "patch.safetensors"]
    assert all(path.match(".patch.safetensors.????????????????.tmp") for path in left)
    (tmp_path / ".patch.safetensors.other.tmp").write_text("somebody else's")
    for path in left:
        os.utime(path, (0, 0))
    eg.Patch.read(tmp_path / "patch.safetensors").write(tmp_path / "patch.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"patch.safetensors", ".patch.safetensors.other.tmp"}
