"""New token rows train under Hugging Face's Trainer and Accelerate, on two ranks as in one process."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import elementgrad as eg

pytest.importorskip("transformers", reason="Hugging Face's Trainer comes with the newest set of packages")
pytest.importorskip("accelerate", reason="Hugging Face's Accelerate comes with the newest set of packages")

from tests.support.hugging_face_ranks import (
    DECAY,
    KNOWN,
    NEW,
    NORM,
    RATE,
    STEPS,
    TABLE,
    TRAINER,
    WIDTH,
    everything,
    gpt2,
    lessons,
)
from tests.support.shared import once

ROOT = Path(__file__).parents[2]
ACCELERATE = ["accelerate", "accelerate accumulated"]
RUNS = [*TRAINER, "resumed", "bfloat16", "bfloat16 resumed", *ACCELERATE, "accelerate resumed"]
EXACT = ["trainer", "accumulated", "checkpointed", "resumed", *ACCELERATE, "accelerate resumed"]
"""The runs in float64, which all come to the same."""


def launch(folder: Path) -> None:
    """Leave what each of two ranks found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *[path for path in sys.path if path]])
    done = subprocess.run(
        [*command, "-m", "tests.support.hugging_face_ranks", str(folder)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return once(tmp_path_factory, "ranks", launch)


@pytest.fixture(scope="module")
def ranks(folder):
    """Return the findings of each of two ranks."""
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the findings of one process."""
    found = once(tmp_path_factory, "alone", lambda folder: torch.save(everything(folder), folder / "found.pt"))
    return torch.load(found / "found.pt", weights_only=False)


@pytest.fixture(scope="module")
def by_hand():
    """The rows after the same steps without us: the whole gradient, of which the rows are taken."""
    model = gpt2()
    weight = model.transformer.wte.weight
    rows = weight[KNOWN:].detach().clone().requires_grad_()
    optimizer = torch.optim.AdamW([rows], lr=RATE, weight_decay=DECAY)
    tokens = torch.stack([lesson["input_ids"] for lesson in lessons()]).reshape(4, 8, 8)
    for step in range(STEPS):
        model.zero_grad()
        model(tokens[step % 4], labels=tokens[step % 4]).loss.backward()
        rows.grad = weight.grad[KNOWN:].clone()
        torch.nn.utils.clip_grad_norm_([rows], NORM)
        optimizer.step()
        with torch.no_grad():
            weight[KNOWN:] = rows
    return rows.detach()


@pytest.mark.parametrize("run", EXACT)
def test_the_rows_are_those_of_one_process_and_of_plain_training(run, ranks, alone, by_hand):
    for rank in ranks:
        assert torch.allclose(rank["runs"][run]["values"], alone[run]["values"], rtol=0, atol=1e-14)
    assert torch.allclose(alone[run]["values"], by_hand, rtol=0, atol=1e-14)
    assert (by_hand - gpt2().transformer.wte.weight[KNOWN:]).abs().min() > 1e-4


@pytest.mark.parametrize("run", RUNS)
def test_ranks_agree_to_the_bit_and_nothing_else_moves(run, ranks, alone):
    first, second = (rank["runs"][run] for rank in ranks)
    assert torch.equal(first["leaf"], second["leaf"])
    assert first["patch"] == second["patch"]
    for found in (first, second, alone[run]):
        assert found["moved"] == 0
        assert found["tied"]
        assert found["undone"]
        assert found["names"] == set(gpt2().state_dict())


@pytest.mark.parametrize("run", RUNS)
def test_one_reduction_for_each_step_of_as_many_numbers_as_there_are_elements(run, ranks):
    steps = STEPS // 2 if "resumed" in run else STEPS
    for rank in ranks:
        assert rank["runs"][run]["sizes"] == [NEW * WIDTH] * steps


@pytest.mark.parametrize(
    ("run", "whole"),
    [("resumed", "trainer"), ("accelerate resumed", "accelerate"), ("bfloat16 resumed", "bfloat16")],
)
def test_a_run_that_was_taken_up_again_ends_as_one_that_was_not_interrupted(run, whole, ranks, alone):
    for found in (alone, *[rank["runs"] for rank in ranks]):
        assert torch.equal(found[run]["leaf"], found[whole]["leaf"])
        assert found[run]["patch"] == found[whole]["patch"]


def test_saved_models_are_plain_ones(folder, ranks):
    from transformers import GPT2LMHeadModel

    values = ranks[0]["runs"]["trainer"]["values"]
    for saved in ("saved", f"checkpoint-{STEPS}"):
        model = GPT2LMHeadModel.from_pretrained(folder / "trainer" / saved, dtype=torch.float64)
        assert torch.equal(model.transformer.wte.weight[KNOWN:], values)
        assert model.lm_head.weight is model.transformer.wte.weight
        assert set(model.state_dict()) == set(gpt2().state_dict())


def test_the_patch_of_the_first_rank_applies_to_the_plain_model(folder, ranks):
    model = gpt2()
    before = copy.deepcopy(model.state_dict())
    patch = folder / "trainer" / f"checkpoint-{STEPS}" / "rows.safetensors"
    assert patch.read_bytes() == ranks[1]["runs"]["trainer"]["patch"]
    applied = eg.apply(model, patch)
    assert torch.equal(model.state_dict()[TABLE][KNOWN:], ranks[0]["runs"]["trainer"]["values"])
    applied.undo()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_preparing_first_is_refused(ranks):
    for rank in ranks:
        around, inside = rank["refused"]
        assert around.startswith("the model is wrapped in DistributedDataParallel already")
        assert inside.startswith("the model was wrapped in DistributedDataParallel before eg.trainable was called")


def test_values_written_on_the_first_rank_reach_all_ranks(ranks):
    first, second = (rank["written"] for rank in ranks)
    assert torch.equal(first[:KNOWN], gpt2().transformer.wte.weight[:KNOWN])
    assert (first[KNOWN:] == 0.5).all()
    assert torch.equal(first, second)


def test_the_example_runs_on_two_ranks(ranks):
    (failed, printed), (also, silent) = (rank["example"] for rank in ranks)
    assert not failed
    assert not also
    assert silent == ""
    for way in ("Trainer", "Accelerate"):
        assert f"{way}, 2 processes\n  other elements that moved, on all processes: 0\n" in printed
    assert printed.count("processes whose rows differ from the first's, by a bit: 0") == 2
    assert printed.count("True; undone to the bit: True") == 2
