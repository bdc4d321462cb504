"""Patches in files and folders of checkpoints: put in and taken back in place or into a copy, whatever happens."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import elementgrad as eg
from elementgrad._cli import main
from elementgrad._train import folder as folders
from elementgrad._train.folder import Folder, read_weights
from tests.support.made import counts
from tests.train.test_diff import bits, sharded

INDEX = "model.safetensors.index.json"


@pytest.fixture
def state():
    torch.manual_seed(0)
    return {f"layer{at}.weight": torch.randn(20, 30, dtype=torch.bfloat16) for at in range(4)}


@pytest.fixture
def tuned(state):
    new = {name: tensor.clone() for name, tensor in state.items()}
    new["layer0.weight"].view(-1)[::7] += 1
    new["layer2.weight"][3] = torch.nan
    return new


@pytest.fixture
def base(state, tmp_path):
    return sharded(tmp_path / "base", state, shards=4)


@pytest.fixture
def patch(state, tuned, tmp_path):
    path = tmp_path / "patch.safetensors"
    eg.diff(state, tuned, path)
    return path


def loaded(folder):
    files = json.loads((folder / INDEX).read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in files.items()}


def listing(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_patched_in_place_and_back(base, patch, state, tuned):
    before = listing(base)
    assert eg.apply(base, patch) == base
    assert bits(loaded(base)) == bits(tuned)
    after = listing(base)
    assert len(after) == len(before)
    unchanged = {"config.json", "model-00002-of-00004.safetensors", "model-00004-of-00004.safetensors"}
    assert {name for name in before if before[name] == after.get(name)} == unchanged
    assert json.loads(after[INDEX])["metadata"] == {"total_size": 1}
    with pytest.raises(eg.PatchError, match="is not the tensor that the patch was made for"):
        eg.apply(base, patch)
    assert listing(base) == after
    assert main(["patch", "undo", str(base), str(patch)]) == 0
    assert bits(loaded(base)) == bits(state)
    eg.apply(base, patch)  # names do not grow with each time
    assert max(map(len, listing(base))) == max(map(len, after))


@pytest.mark.parametrize("link", [False, True])
def test_a_new_folder_has_all_that_the_old_one_has(base, patch, tuned, tmp_path, link, capsys):
    (base / "tokenizer").mkdir()
    (base / "tokenizer" / "vocab.txt").write_text("a b c")
    before = listing(base)
    out = tmp_path / "new"
    assert main(["patch", "apply", str(base), str(patch), "--out", str(out), *(["--link"] if link else [])]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "layer2.weight[3]"
    assert bits(loaded(out)) == bits(tuned)
    assert listing(base) == before
    assert set(listing(out)) == set(before)
    same = os.path.samefile(base / "model-00002-of-00004.safetensors", out / "model-00002-of-00004.safetensors")
    assert same == link
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_folder_with_one_file_and_a_file_are_patched_in_place(state, tuned, patch, tmp_path):
    (tmp_path / "one").mkdir()
    for path, target in ((tmp_path / "one", tmp_path / "one" / "model.safetensors"), (tmp_path / "w.safetensors",) * 2):
        save_file(state, target, metadata={"format": "pt"})
        assert eg.apply(path, patch) == path
        assert bits(load_file(target)) == bits(tuned)
        assert eg.diff(path, tuned).size == 0
        assert main(["patch", "undo", str(path), str(patch)]) == 0
        assert bits(load_file(target)) == bits(state)
    new = eg.apply(tmp_path / "w.safetensors", patch, out=tmp_path / "new.safetensors")
    assert bits(load_file(new)) == bits(tuned)
    assert bits(load_file(tmp_path / "w.safetensors")) == bits(state)


def test_training_patches_the_folder_on_disk_as_the_model_in_memory(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).bfloat16()
    base = sharded(tmp_path / "base", copy.deepcopy(model).state_dict())
    elements = eg.trainable(model, ["0.weight[[3, 7]]", "2.weight[:, 1]", "1.bias"])
    optimizer = torch.optim.AdamW(elements.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.tensor([3, 7, 9])).float().square().sum().backward()
        optimizer.step()
    elements.save(tmp_path / "p.safetensors")
    elements.release()
    assert main(["patch", "apply", str(base), str(tmp_path / "p.safetensors")]) == 0
    assert bits(loaded(base)) == bits(model.state_dict())
    assert eg.diff(base, model).size == 0


def test_state_dicts_are_patched_into_new_ones(state, tuned, patch):
    before = bits(state)
    new = eg.apply(state, patch)
    assert bits(new) == bits(tuned)
    assert bits(state) == before
    assert new["layer1.weight"] is state["layer1.weight"]
    arrays = {"a": {"b": np.float32([1, 2, 3])}, "c": np.int64([1])}
    other = {"a": {"b": np.float32([1, 5, 3])}, "c": np.int64([9])}
    new = eg.apply(arrays, eg.diff(arrays, other))
    assert (new["a"]["b"].tolist(), new["c"].tolist(), arrays["a"]["b"].tolist()) == ([1, 5, 3], [9], [1, 2, 3])


def test_the_command_compares_and_inspects_folders(base, state, tuned, tmp_path, capsys):
    other = sharded(tmp_path / "tuned", tuned, shards=2)
    path = tmp_path / "p.safetensors"
    assert main(["patch", "diff", str(base), str(other), "--out", str(path)]) == 0
    assert eg.inspect(path).size == eg.diff(state, tuned).size
    for folder, says, code in ((base, "fits", 0), (other, "is applied", 0)):
        capsys.readouterr()
        assert main(["patch", "inspect", str(path), str(folder)]) == code
        assert capsys.readouterr().out.splitlines()[-1] == f"{folder}: {says}"
    strange = sharded(tmp_path / "strange", {name: -tensor for name, tensor in state.items()})
    assert main(["patch", "inspect", str(path), str(strange), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["state"] == "does not fit"
    assert main(["patch", "diff", str(base), str(other), "--out", str(path), "--no-originals"]) == 0
    assert eg.inspect(path).entries[0].originals is None
    assert main(["patch", "apply", str(base), str(path)]) == 0
    assert bits(loaded(base)) == bits(tuned)
    assert main(["patch", "undo", str(base), str(path)]) == 2
    assert "has only a checksum of the originals" in capsys.readouterr().err


def write_index(base, **files):
    (base / INDEX).write_text(
        json.dumps({"weight_map": {"layer0.weight": "model-00001-of-00004.safetensors", **files}})
    )


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda base: (base / "model-00003-of-00004.safetensors").unlink(), "names model-00003-of-00004.* not there"),
        (lambda base: (base / INDEX).write_text("{"), "is not an index of a checkpoint"),
        (lambda base: (base / INDEX).write_text("[" * 100_000), "is not an index of a checkpoint"),
        (lambda base: (base / INDEX).write_text("{}"), "is not an index of a checkpoint"),
        (lambda base: (base / INDEX).unlink(), "holds 4 .safetensors files and no safetensors.index.json"),
        (lambda base: (base / f"other.{INDEX}").write_text("{}"), "has several indices"),
        (lambda base: write_index(base, x="../patch.safetensors"), "which is not a .safetensors file of the folder"),
        (lambda base: write_index(base, x="model-00002-of-00004.safetensors"), "says that x is in model-00002"),
        (lambda base: write_index(base), "no tensor named 'layer2.weight'"),
    ],
)
def test_folders_that_do_not_hold_together_are_refused(base, patch, spoil, says):
    spoil(base)
    before = listing(base)
    with pytest.raises(eg.PatchError, match=says):
        eg.apply(base, patch)
    assert listing(base) == before


def test_places_to_write_to_are_checked(base, patch, tmp_path):
    for out, says in ((base, "the folder itself"), (base / "new", "or inside of it"), (tmp_path, "is there already")):
        with pytest.raises(eg.OptionError, match=says):
            eg.apply(base, patch, out=out)
    with pytest.raises(eg.OptionError, match="there is no directory"):
        eg.apply(base, patch, out=tmp_path / "missing" / "new")
    with pytest.raises(eg.OptionError, match="out= says where the weights of a file or folder go"):
        eg.apply(torch.nn.Linear(2, 2), patch, out=tmp_path / "new")


def test_the_cache_of_hugging_face_is_not_written_to(base, patch, tmp_path, tuned):
    cache = tmp_path / "snapshot"
    cache.mkdir()
    for path in base.iterdir():
        (cache / path.name).symlink_to(path)
    before = listing(base)
    with pytest.raises(eg.OptionError, match=r"is a link, as in the cache of Hugging Face.* with out="):
        eg.apply(cache, patch)
    out = eg.apply(cache, patch, out=tmp_path / "own")
    assert listing(base) == before
    assert bits(loaded(out)) == bits(tuned)
    assert not any(path.is_symlink() for path in out.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("out", [None, "new"])
def test_a_full_disk_leaves_the_old_checkpoint(base, patch, tmp_path, monkeypatch, at, error, out):
    before, sync, calls = listing(base), os.fsync, []

    def fail(descriptor):
        calls.append(descriptor)
        if len(calls) > 2 * at:
            raise error
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        eg.apply(base, patch, out=None if out is None else tmp_path / out)
    assert listing(base) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "patch.safetensors"]


def test_a_limit_on_files_and_a_folder_for_a_patch_are_said_in_a_sentence(base, patch):
    resource = pytest.importorskip("resource")
    before, limits = listing(base), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large, so that nothing was changed; make room"):
            eg.apply(base, patch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert listing(base) == before
    with pytest.raises(IsADirectoryError, match="it is a folder, and a patch is a file"):
        eg.inspect(base)


def test_temporary_files_of_killed_processes_are_removed_after_an_hour(base, patch, tmp_path):
    stale = [
        "model-00001-of-00004.0123456789abcdef.safetensors",
        ".model-00001-of-00004.0123456789abcdef.safetensors.0123456789abcdef.tmp",
    ]
    for name in (*stale, "other.safetensors"):
        (base / name).write_text("")
    fresh = "model-00002-of-00004.0123456789abcdee.safetensors"
    (base / fresh).write_text("")
    for name in (*stale, "other.safetensors"):
        os.utime(base / name, (0, 0))
    eg.apply(base, patch, out=tmp_path / "new")
    assert not {*stale, fresh} & set(listing(tmp_path / "new"))
    eg.apply(base, patch)
    assert {"other.safetensors", fresh} <= set(listing(base))
    assert not set(stale) & set(listing(base))
    assert folders.UNFINISHED.fullmatch(stale[1])


def test_a_folder_has_its_tensors_by_name(base, state):
    weights = read_weights(base)
    assert isinstance(weights, Folder)
    assert list(weights.tensors) == list(state)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kind", ["folder", "file", "diff"])
def test_a_process_killed_while_it_patches_leaves_the_old_weights_or_the_new(tmp_path, kind):
    """A sample; `tests/slow` has five hundred."""
    kill_and_look(tmp_path, counts(10), kind)


def kill_and_look(tmp_path, kills, kind):
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.killed_weights", str(tmp_path), str(kills), kind],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])},
        capture_output=True,
        text=True,
        timeout=60 + 3 * kills,
    )
    assert done.returncode == 0, done.stderr
    assert sum(json.loads(done.stdout)["found"]) == kills
