"""Elements of models that several processes train together: real ones, started by `torchrun` over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import elementgrad as eg
from tests.support import sharded_torch, sharded_torch_models
from tests.support.shared import once

ROOT = Path(__file__).parents[2]
COUNTS = (2, 4)
CHECKS = [check.__name__ for check in sharded_torch.EVERYWHERE]


def launch(folder: Path) -> None:
    """Leave what every process of every launch saw, and what one alone sees."""
    alone = {f"single {check.__name__}": check("single", folder) for check in sharded_torch.EVERYWHERE}
    (folder / "facts-1-0.json").write_text(json.dumps(alone))
    for count in COUNTS:
        launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        run = subprocess.run(
            [*launched, "-m", "tests.support.sharded_torch", str(folder)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert run.returncode == 0, run.stderr[-6000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return once(tmp_path_factory, "sharded", launch)


@pytest.fixture(scope="module")
def facts(folder):
    """Return what each process saw, by the number of processes and its rank."""
    every = [(count, rank) for count in (1, *COUNTS) for rank in range(count)]
    return {(count, rank): json.loads((folder / f"facts-{count}-{rank}.json").read_text()) for count, rank in every}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("count", COUNTS)
def test_training_is_that_of_one_process(facts, count, engine, check):
    alone = facts[1, 0][f"single {check}"]
    ranks = [facts[count, rank][f"{engine} {check}"] for rank in range(count)]
    assert all(rank == ranks[0] for rank in ranks)  # values, norms, and the hashes of leaves and parameters
    if check == "exactly":
        assert ranks[0] == alone
        return
    assert ranks[0]["outside"]
    halves = check in ("in_bfloat16", "of_bfloat16")
    rounding = 2e-2 if halves else 2e-5
    for mine, expected in zip(ranks[0]["values"], alone["values"], strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=rounding)
    np.testing.assert_allclose(ranks[0]["norms"], alone["norms"], rtol=5e-2 if halves else 1e-4)


@pytest.mark.parametrize("count", COUNTS)
def test_gradients_on_the_wire_are_as_many_as_the_elements(facts, count):
    ddp, fsdp = facts[count, 0]["ddp counting"], facts[count, 0]["fsdp counting"]
    assert ddp["gradients"] == 4 * sharded_torch_models.SIZE
    assert fsdp["gradients"] == 4 * (
        sharded_torch_models.SIZE + len(sharded_torch_models.PLACES)
    )  # and whether each place heard
    assert fsdp["gathered"] == fsdp["frozen"]  # parameters, as in a model that does not train


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_patches_fit_the_model_of_one_process(facts, folder, engine, count):
    plain = sharded_torch_models.made()
    eg.apply(plain, folder / f"{engine}-{count}.safetensors")
    values = facts[count, 0][f"{engine} plainly"]["values"]
    for place, expected in zip(sharded_torch_models.PLACES, values, strict=True):
        parsed = eg.Place.parse(place)
        held = dict(plain.named_parameters())[parsed.name].detach()
        assert eg.at(held)[parsed.index].get().reshape(-1).tolist() == expected


def test_training_goes_on_with_more_processes_and_with_one(facts, folder):
    """Two steps by two processes and two by four are four by one, which goes on with their patch."""
    model, elements = sharded_torch.prepared("single")
    optimizer = torch.optim.AdamW(elements.parameters(), lr=0.05, weight_decay=0.1)
    norms = sharded_torch.train("single", model, elements, range(4), optimizer=optimizer)
    for count, steps in ((2, slice(0, 2)), (4, slice(2, 4))):
        ranks = [facts[count, rank]["resumed"] for rank in range(count)]
        assert all(rank == ranks[0] for rank in ranks)
        assert ranks[0]["outside"]
        np.testing.assert_allclose(ranks[0]["norms"], norms[steps], rtol=1e-4)
    for mine, expected in zip(ranks[0]["values"], elements.parameters(), strict=True):
        np.testing.assert_allclose(mine, expected.detach().numpy(), rtol=0, atol=2e-5)
    last = eg.trainable(sharded_torch_models.made(), folder / "resume-4.safetensors")
    assert [leaf.tolist() for leaf in last.parameters()] == ranks[0]["values"]


def test_other_wrappers_are_refused():
    with pytest.raises(eg.FrameworkError, match="DataParallel copies the model in every forward"):
        eg.trainable(torch.nn.DataParallel(torch.nn.Linear(2, 2)), "weight[0, 0]")
