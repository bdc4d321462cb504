"""A Jacobian on disk: what is there is kept, what is missing is read, and what is of another function is refused."""

import copy
import errno
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch
import zarr

import elementgrad as eg
from elementgrad._read import workers as driver
from elementgrad._read.zarr import ATTRIBUTE, Store
from tests.support.distributed_functions import Fit, arguments, watched
from tests.support.distributed_pools import QUIET, ROOT, Copied, Elsewhere


def test_stored_chunks_are_reused_and_another_jacobian_is_refused(tmp_path):
    log, out = tmp_path / "log", tmp_path / "j.zarr"
    x, weight = arguments()

    def ask(x=x, weight=weight, budget=5_000, more=1.0):
        inner = watched(str(log))
        return eg.jacobian(lambda x, weight: more * inner(x, weight), x, weight, wrt="x", budget=budget)

    whole = ask().dense(out=out)[:]
    chunks = sorted(out.glob("c/*/0"))
    assert len(chunks) == len(ask().blocks()) > 5
    for chunk in chunks[2:4]:
        chunk.unlink()
    Path(f"{chunks[2]}.0123.partial").write_bytes(b"half of it")
    metadata = json.loads((out / "zarr.json").read_text())
    metadata["attributes"]["elementgrad"]["complete"] = False
    (out / "zarr.json").write_text(json.dumps(metadata))
    log.unlink()
    np.testing.assert_array_equal(ask().dense(out=out)[:], whole)
    assert len(log.read_text().splitlines()) == 1 + 2  # one to find out what can be done, one for each block
    assert sorted(out.glob("c/*/*")) == chunks
    nudged = weight.clone()
    nudged[3, 7] += 1e-15
    for other in (ask(x=x + 1), ask(weight=nudged), ask(budget=40_000), ask(more=1 + 1e-9)):
        with pytest.raises(eg.OptionError, match="of another function, point, plan or budget; give another name"):
            other.dense(out=out)


class Slotted:
    """An object without a dict."""

    __slots__ = ("data",)

    def __init__(self, data):
        self.data = data


def residuals(data, x):
    return torch.tanh(data @ x)


def reaching(reach: str, data: torch.Tensor, scale: float):
    """A function of one argument that reads a tensor and a number in some way."""
    layer = torch.nn.Linear(40, 80, bias=False, dtype=data.dtype)
    layer.weight.data.copy_(data)
    several, slotted, space = [{"data": data}], Slotted(data), SimpleNamespace(data=data, scale=scale)
    fit = Fit(torch.tanh, data, scale)

    def inner(x):
        return data @ x

    found = {
        "closure": lambda x: torch.tanh(data @ x) * scale,
        "function": lambda x: torch.tanh(inner(x)) * scale,
        "model": lambda x: torch.tanh(layer(x)) * scale,
        "list": lambda x: torch.tanh(several[0]["data"] @ x) * scale,
        "slots": lambda x: torch.tanh(slotted.data @ x) * scale,
        "namespace": lambda x: torch.tanh(space.data @ x) * space.scale,
        "object": lambda x: fit.method(x),
        "method": fit.method,
        "callable": Fit(functools.partial(residuals, data), scale=scale),
        "partial": functools.partial(lambda data, scale, x: torch.tanh(data @ x) * scale, data, scale),
        "default": lambda x, data=data, scale=scale: torch.tanh(data @ x) * scale,
        "array": (lambda array: lambda x: residuals(torch.from_numpy(array), x) * scale)(data.numpy()),
        "wrapped": torch.func.vmap(lambda row, x: torch.tanh(row @ x) * scale, (0, None)),
    }
    return (lambda x: found["wrapped"](data, x)) if reach == "wrapped" else found[reach]


REACHES = [
    "closure",
    "function",
    "model",
    "list",
    "slots",
    "namespace",
    "object",
    "method",
    "callable",
    "partial",
    "default",
    "array",
    "wrapped",
]


WAYS = ("closure", "function", "model", "list", "slots", "namespace", "object", "method", "callable", "partial")


@pytest.mark.parametrize("reach", [*WAYS, "default", "array", "wrapped"])
def test_changed_closures_refuse_the_stored_array(tmp_path, reach):
    x, data = torch.linspace(-1, 1, 40), torch.linspace(-1, 1, 80 * 40).reshape(80, 40)
    other = data.clone()
    other[3, 7] += 1e-6  # which no sum over all of it tells

    def ask(data, scale=1.0):
        eg.jacobian(reaching(reach, data, scale), x, budget=5_000).dense(out=tmp_path / "j.zarr")

    ask(data)
    ask(data.clone())
    ask(data, 1 + 1e-9)  # no other function, as this is 1 in float32
    for another in ((other,), (data, 1 + 1.2e-7)):
        with pytest.raises(eg.OptionError, match=r"of another function, .*: what differs is numbers that"):
            ask(*another)


def test_parameters_and_buffers_of_a_model_are_known_to_the_bit(tmp_path):
    x, model = torch.linspace(-1, 1, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).eval()

    def ask(model):
        eg.jacobian(model, x[None]).dense(out=tmp_path / "j.zarr")

    ask(model)
    ask(copy.deepcopy(model))
    for name, tensor in {**dict(model.named_parameters()), "1.running_mean": model[1].running_mean}.items():
        before = tensor.data.clone()
        tensor.data.view(-1)[1].add_(1e-6 + 1e-6 * before.view(-1)[1].abs())
        with pytest.raises(eg.OptionError, match=rf"what differs is .* {re.escape(name)}$"):
            ask(model)
        tensor.data.copy_(before)


def test_changed_code_or_globals_refuse_the_stored_array(tmp_path):
    x = torch.tensor([0.0, 0.5, 1.0])

    def ask(code):
        space = {"torch": torch, "__name__": "users"}
        exec(code, space)
        return eg.jacobian(space["f"], x).dense(out=tmp_path / "j.zarr")

    same = "LOW, HIGH = 1e-9, 2\ndef f(x):\n    return torch.stack([LOW + each for each in torch.sin(x)])"
    ask(same)
    ask("# moved by some lines\n\nTHIRD = 3\n" + same.replace("HIGH = 1e-9, 2", "HIGH = 1e-9, 4"))
    for other in (same.replace("sin", "tanh"), same.replace("1e-9", "2e-9")):
        with pytest.raises(eg.OptionError, match=r"what differs is numbers that the function leads to$"):
            ask(other)


def test_one_row_of_many_is_seen_where_a_function_cannot_be_looked_into(tmp_path):
    x = torch.tensor([0.1, 0.2])

    def ask(rows):
        hidden = array("f", rows)  # an object without attributes
        return eg.jacobian(lambda x: torch.tanh(torch.tensor(hidden)[:, None] * x).sum(1), x).dense(
            out=tmp_path / "j.zarr"
        )

    rows = np.random.default_rng(0).normal(size=200_000)
    rounded = rows * (1 + 1e-8)
    ask(rows)
    with pytest.raises(eg.OptionError, match="what differs is numbers that the function leads to"):
        ask(rounded)
    torch.set_num_threads(2)
    try:
        ask(rounded)  # as other threads may sum
        rows[-7] *= 1.01
        with pytest.raises(eg.OptionError, match="what differs is numbers that the function leads to"):
            ask(rows)
    finally:
        torch.set_num_threads(1)


def test_bits_are_not_compared_where_sweeps_are_not_deterministic(tmp_path):
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, slope):
            return slope * 2 * (1 + 1e-6 * rng.random())  # as threads that add in any order

    rng = np.random.default_rng(0)
    J = eg.jacobian(Noisy.apply, torch.linspace(0, 1, 30))
    for _ in range(3):
        array = J.dense(out=tmp_path / "j.zarr")
        np.testing.assert_allclose(array[:], 2 * np.eye(30), rtol=1e-5)


@pytest.mark.parametrize("numbers", [tf.constant, jnp.asarray], ids=["tensorflow", "jax"])
def test_other_frameworks_know_a_function_to_the_bit(tmp_path, numbers):
    x, data = (np.linspace(-1, 1, size, dtype=np.float32) for size in (40, 3200))

    def ask(data):
        data = numbers(data.reshape(80, 40))
        eg.jacobian(lambda x: data @ x[:, None], numbers(x)).dense(out=tmp_path / "j.zarr")

    ask(data)
    ask(data.copy())
    data[127] += 1e-6
    with pytest.raises(eg.OptionError, match="what differs is numbers that the function leads to"):
        ask(data)


def test_an_unreadable_block_is_one_error_before_any_work(tmp_path):
    log, out = tmp_path / "log", tmp_path / "j.zarr"
    J = eg.jacobian(watched(str(log)), *arguments(rows=41), wrt="x", budget=5_000)
    J.dense(out=out)
    chunk = out / "c/2/0"
    chunk.unlink()
    chunk.mkdir()
    with pytest.raises(eg.OptionError, match=r"c/2/0 is in the way of a block of the array; remove it"):
        J.dense(out=out)
    chunk.rmdir()
    chunk.parent.rmdir()
    chunk.parent.touch()
    with pytest.raises(eg.OptionError, match=r"c/2 is in the way of a directory of the array; remove it"):
        J.dense(out=out)
    chunk.parent.unlink()
    assert not np.isnan(J.dense(out=out)[:]).any()


def test_chunks_that_are_not_written_are_nan(tmp_path):
    J = eg.jacobian(lambda x: x**2, torch.ones(8), budget=100)
    J.dense(out=tmp_path / "j.zarr")
    next((tmp_path / "j.zarr").glob("c/0/0")).unlink()
    assert np.isnan(zarr.open_array(tmp_path / "j.zarr")[0]).all()


def test_workers_without_a_shared_disk_send_their_blocks(tmp_path):
    x, weight = arguments(rows=30, columns=2000)
    assert weight.nbytes > driver.INLINE_BYTES
    J = eg.jacobian(watched(), x, weight, wrt="x", budget=200_000)
    with Elsewhere(2) as pool:
        np.testing.assert_array_equal(J.dense(executor=pool, out=tmp_path / "j.zarr")[:], J.dense().numpy())


def test_a_killed_driver_leaves_its_chunks_and_the_next_continues(tmp_path):
    log, out = tmp_path / "log", tmp_path / "j.zarr"
    command = [sys.executable, "-m", "tests.support.distributed_run", "killed", str(out), str(log)]
    driven = subprocess.Popen(command, cwd=ROOT, env=os.environ | QUIET, start_new_session=True)
    try:
        assert driven.wait(timeout=120) == -signal.SIGKILL
    finally:
        os.killpg(driven.pid, signal.SIGKILL)  # its workers, who wait for tasks that nobody sends
    done = {chunk: chunk.stat().st_ino for chunk in out.glob("c/*/0")}
    J = eg.jacobian(Fit(watched(str(log), pause=0.02)), *arguments(), wrt="x", budget=5_000)
    blocks = J.blocks()
    assert 5 <= len(done) < len(blocks)
    log.unlink()
    array = J.dense(out=out)
    left = sum(1 for number in range(len(blocks)) if out / f"c/{number}/0" not in done)
    assert len(log.read_text().splitlines()) == 1 + left
    assert {chunk: chunk.stat().st_ino for chunk in done} == done
    np.testing.assert_array_equal(array[:], J.dense().numpy())


def test_blocks_written_to_a_workers_own_copy_are_read_again(tmp_path):
    out, other = tmp_path / "j.zarr", tmp_path / "copy.zarr"
    J = eg.jacobian(torch.tanh, torch.ones(64), budget=2000)
    J.dense(out=out)
    for chunk in sorted(out.glob("c/*/0"))[5:9]:
        chunk.unlink()
    shutil.copytree(out, other)
    with Copied(other) as pool:
        array = J.dense(executor=pool, out=out)
    np.testing.assert_array_equal(array[:], J.dense().numpy())


def test_calls_that_begin_at_once_share_one_array(tmp_path):
    J = eg.jacobian(torch.sin, torch.ones(30))
    blocks = J.blocks()
    asked = blocks._fingerprint()
    with ThreadPoolExecutor(8) as calls:
        stores = calls.map(
            lambda _: Store.at(tmp_path / "j.zarr", blocks.layout, np.dtype("float32"), "J", asked), range(8)
        )
    assert len({store.mark for store in stores}) == 1


def flipped(content: bytes, byte: int, bit: int) -> bytes:
    """The content with another bit."""
    changed = bytearray(content)
    changed[byte] ^= 1 << bit
    return bytes(changed)


DAMAGES = {
    "the first bit": lambda content: flipped(content, 0, 0),
    "a bit in the middle": lambda content: flipped(content, len(content) // 2, 3),
    "the last bit, of the checksum": lambda content: flipped(content, -1, 7),
    "half of it": lambda content: content[: len(content) // 2],
    "a byte short": lambda content: content[:-1],
    "a byte more": lambda content: content + b"0",
    "too short for a checksum": lambda content: content[:3],
    "nothing": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
    "not there": lambda content: None,
}


def damage(chunk: Path, how: str) -> None:
    content = DAMAGES[how](chunk.read_bytes())
    chunk.unlink() if content is None else chunk.write_bytes(content)


@pytest.mark.parametrize("pool", [None, ThreadPoolExecutor], ids=["alone", "workers"])
def test_damaged_chunks_are_computed_again_and_no_others(tmp_path, pool):
    log, out = tmp_path / "log", tmp_path / "j.zarr"
    J = eg.jacobian(watched(str(log)), *arguments(rows=41), wrt="x", budget=5_000)
    whole = J.dense(out=out)[:]
    chunks = sorted(out.glob("c/*/0"), key=lambda chunk: int(chunk.parent.name))
    assert len(chunks) > len(DAMAGES)
    assert whole.shape[0] % J.blocks().layout.largest  # so that the last is smaller
    hurt = [*chunks[: len(DAMAGES) - 1], chunks[-1]]
    for chunk, how in zip(hurt, reversed(DAMAGES), strict=True):
        damage(chunk, how)
    sound = {chunk: chunk.stat().st_ino for chunk in chunks if chunk not in hurt}
    log.unlink()
    with nullcontext() if pool is None else pool(2) as executor:
        array = J.dense(out=out, executor=executor)
    np.testing.assert_array_equal(array[:], whole)
    assert array.attrs["elementgrad"]["complete"] is True
    assert len(log.read_text().splitlines()) == 1 + len(hurt)  # one to find out what can be done
    assert {chunk: chunk.stat().st_ino for chunk in sound} == sound


def test_an_array_with_a_damaged_chunk_raises_where_it_is_read_and_is_not_complete_until_it_is_mended(tmp_path):
    J, out = eg.jacobian(torch.sin, torch.linspace(0, 1, 30)), tmp_path / "j.zarr"
    array = J.dense(out=out)
    damage(out / "c/7/0", "a bit in the middle")
    with pytest.raises(ValueError, match="checksum"):
        array[:]
    store = Store.open_shared(out, J.blocks().layout, array.attrs[ATTRIBUTE]["mark"])
    store.remove_damaged()  # and the process is killed
    assert zarr.open_array(out, mode="r").attrs[ATTRIBUTE]["complete"] is False
    assert J.dense(out=out).attrs[ATTRIBUTE]["complete"] is True


def test_arrays_without_checksums_are_gone_on_with(tmp_path):
    J, out = eg.jacobian(torch.sin, torch.linspace(0, 1, 30)), tmp_path / "j.zarr"
    J.dense(out=out)
    metadata = json.loads((out / "zarr.json").read_text())
    assert metadata["codecs"].pop() == {"name": "crc32c"}  # as it was written once
    (out / "zarr.json").write_text(json.dumps(metadata))
    for chunk in out.glob("c/*/0"):
        chunk.write_bytes(chunk.read_bytes()[:-4])
    for number, how in enumerate(("half of it", "nothing", "not there")):
        damage(out / f"c/{number}/0", how)
    np.testing.assert_array_equal(J.dense(out=out)[:], J.dense())


def test_metadata_that_describe_another_array_are_not_gone_on_with(tmp_path):
    J, out = eg.jacobian(torch.sin, torch.ones(30)), tmp_path / "j.zarr"
    J.dense(out=out)
    text = (out / "zarr.json").read_text()
    (out / "zarr.json").write_text(text.replace("float32", "float64"))
    with pytest.raises(eg.OptionError, match=r"is damaged: its zarr\.json describes another array; remove it"):
        J.dense(out=out)


def test_calls_that_begin_at_once_on_a_disk_without_links_share_one_array(tmp_path, monkeypatch):
    def link(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    test_calls_that_begin_at_once_share_one_array(tmp_path)
    assert os.listdir(tmp_path / "j.zarr") == ["zarr.json"]
    (tmp_path / "left.zarr").mkdir()
    (tmp_path / "left.zarr/zarr.json.partial").touch()
    monkeypatch.setattr("elementgrad._read.zarr.MAX_WAIT", 0.05)
    with pytest.raises(eg.OptionError, match=r"has left zarr\.json\.partial behind; remove it"):
        eg.jacobian(torch.sin, torch.ones(3)).dense(out=tmp_path / "left.zarr")


def test_an_array_is_not_called_complete_while_blocks_are_missing(tmp_path):
    J = eg.jacobian(torch.tanh, torch.ones(64), budget=2000)
    mark = J.dense(out=tmp_path / "j.zarr").attrs["elementgrad"]["mark"]
    next((tmp_path / "j.zarr").glob("c/3/0")).unlink()
    store = Store.open_shared(tmp_path / "j.zarr", J.blocks().layout, mark)
    with pytest.raises(eg.WorkerError, match="1 blocks were written and are not in"):
        store.finish()
