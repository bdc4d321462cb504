"""Every way to read, of every kind of side, on every framework: one table, against blocks of the dense matrix."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import keras
import numpy as np
import pytest
import torch

import elementgrad as eg
from tests.support import functions
from tests.support.frameworks import FRAMEWORKS, JAX, TENSORFLOW, TORCH
from tests.support.functions import OPS, Case
from tests.support.operations import point

EXACT = {"rtol": 1e-9, "atol": 1e-11}
POINT = point(2, 3)
EXAMPLES = point(2, 2, 3)
MASK = np.array([[True, False, True], [False, True, True]])


def turned(o, x):
    """From (2, 3) to (3, 2); each column of the output depends on a row of the input."""
    return o.transpose(x, (1, 0)) ** 2 * o.sum(o.sin(x), axis=1)


def turned_each(o, x):
    return o.transpose(x, (0, 2, 1)) ** 2 * o.sum(o.sin(x), axis=2)[:, None, :]


CASE = Case("turned", turned, POINT)


def total(o, x):
    return functions.scalar(o, CASE)(x)


@dataclass(frozen=True)
class Kind:
    """Some elements of a tensor: in words of ours, and as NumPy indexes them."""

    name: str
    place: Callable[[str], Any]
    index: Any


KINDS = [
    Kind("whole", lambda name: name, ...),
    Kind("element", lambda name: f"{name}[1, 0]", (1, 0)),
    Kind("int", lambda name: f"{name}[1]", 1),
    Kind("slice", lambda name: f"{name}[1:]", np.s_[1:]),
    Kind("steps", lambda name: f"{name}[::-1, 1]", np.s_[::-1, 1]),
    Kind("block", lambda name: f"{name}[0:2, 0:2]", np.s_[0:2, 0:2]),
    Kind("arrays", lambda name: f"{name}[[1, 0, 1], [1, 0, 1]]", ([1, 0, 1], [1, 0, 1])),
    Kind("beside", lambda name: eg.at(name)[:, [1, 0]], np.s_[:, [1, 0]]),
    Kind("mask", lambda name: eg.at(name)[MASK if name != "output" else MASK.T], "mask"),
    Kind("coords", lambda name: eg.at(name).coords([[0, 1], [1, 1], [0, 0]]), ([0, 1, 0], [1, 1, 0])),
]
NAMES = [kind.name for kind in KINDS]
PAIRS = [(name, NAMES[(number + step) % len(NAMES)]) for number, name in enumerate(NAMES) for step in (0, 1)]


@cache
def positions(name, shape):
    index = KINDS[NAMES.index(name)].index
    if index == "mask":
        index = MASK if shape == MASK.shape else MASK.T
    return np.arange(np.prod(shape)).reshape(shape)[index]


class TorchModel(torch.nn.Module):
    def __init__(self, f):
        super().__init__()
        self.w, self.f = torch.nn.Parameter(torch.tensor(POINT)), f

    def forward(self, x):
        return self.f(OPS["torch"], self.w) * x


class KerasModel(keras.Model):
    def __init__(self, f):
        super().__init__(dtype="float64")
        self.w, self.f = self.add_weight(shape=POINT.shape, name="w", dtype="float64"), f
        self.w.assign(POINT)

    def call(self, x):
        return self.f(OPS["tensorflow"], self.w.value) * x


@partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["f"])
@dataclass(frozen=True)
class JaxModel:
    w: Any
    f: Any

    def __call__(self, x):
        return self.f(OPS["jax"], self.w) * x


MODELS = {
    TORCH: TorchModel,
    TENSORFLOW: KerasModel,
    JAX: lambda f: JaxModel(JAX.tensor(POINT), f),
}


def called(fw, f, source):
    """A function with its input, and the name of what it is differentiated by: an argument, or a parameter."""
    if source == "parameter":
        return MODELS[fw](f), fw.tensor(1.0), "w"
    return (lambda x: f(OPS[fw.name], x)), fw.tensor(POINT), "x"


def ints(shape, number):
    """One element of a side, as one writes it: an int of one axis, a tuple of several, `...` of none."""
    if not shape:
        return ...
    where = tuple(int(part) for part in np.unravel_index(number % int(np.prod(shape)), shape))
    return where if len(shape) > 1 else where[0]


def assert_every_read_is(fw, J, own, out, into, reads):
    """Compare every read of a Jacobian with a block in NumPy, of shape `(*examples, *out, *into)`."""
    examples = own.shape[: own.ndim - len(out) - len(into)]
    matrix = own.reshape(*examples, int(np.prod(out)), int(np.prod(into)))
    rng = np.random.default_rng(0)

    def same(read, expected):
        assert tuple(read.shape) == np.shape(expected)
        np.testing.assert_allclose(fw.numpy(read), expected, **EXACT)

    assert J.shape == own.shape
    rows, columns = matrix.shape[-2:]
    for row, column in ((0, columns - 1), (rows - 1, 0)):
        down, right = ints(out, row), ints(into, column)
        same(J[down, right], matrix[..., row, column])
        same(J[down, :], matrix[..., row, :].reshape((*examples, *into)))
        same(J[..., right], matrix[..., :, column].reshape((*examples, *out)))
    plan = J.plan(ints(out, 0), ints(into, 0))
    assert (plan.sweeps, plan.task.numbers) == (1, np.prod(examples, dtype=int))
    assert J.plan().task.numbers == own.size
    if out and into:
        outs, ins = rng.integers(rows, size=3), rng.integers(columns, size=3)
        at = tuple(np.unravel_index(outs, out)), tuple(np.unravel_index(ins, into))
        same(J[at], matrix[..., outs[:, None], ins])
        same(J.entries(*at), matrix[..., outs, ins])
        mask = np.arange(columns).reshape(into) % 2 == 0
        flipped = np.flip(matrix.reshape(*examples, *out, columns), len(examples))
        same(J[::-1, mask], flipped[..., mask.reshape(-1)])
    if out == into:
        same(J.diagonal(), np.diagonal(matrix, axis1=-2, axis2=-1).reshape((*examples, *out)))
    u, v = rng.normal(size=(2, *examples, *out)), rng.normal(size=(*examples, *into, 2))
    wide, high = v.reshape(*examples, columns, 2), u.reshape(2, *examples, 1, rows)
    same(J @ fw.tensor(v), (matrix @ wide).reshape(*examples, *out, 2))
    same(J @ fw.tensor(v[..., 0]), (matrix @ wide)[..., 0].reshape((*examples, *out)))
    same(fw.tensor(u) @ J, (high @ matrix).reshape(2, *examples, *into))
    same(fw.tensor(u[0]) @ J, (high[0] @ matrix).reshape((*examples, *into)))
    same(J.dense(), own)
    if "blocks" in reads:
        whole = np.zeros(matrix.shape)
        for block in J.blocks():
            whole[..., block.rows, block.columns] = block.values
        np.testing.assert_allclose(whole, matrix, **EXACT)
    if "sparse" in reads:
        np.testing.assert_allclose(J.sparse("scipy").toarray(), matrix, **EXACT)
        assert not ((matrix != 0) & ~J.pattern().dense()).any()
        same(J.dense(), own)  # by colours
        same(J[ints(out, 1), ints(into, 1)], matrix[1 % rows, 1 % columns])


def all_of(name):
    return {kind.name: kind.place(name) for kind in KINDS}


def block(matrix, of, wrt):
    """Of a matrix of the whole tensors the part that two sides name."""
    shape = *matrix.shape[:-2], *of.shape, *wrt.shape
    return matrix[..., of.reshape(-1)[:, None], wrt.reshape(-1)].reshape(shape)


def every(fw, source=None):
    return pytest.param(fw, source, id=f"{fw.name}-{source}")


READS = {"argument": {0: ["sparse"], 2: ["sparse"]}, "parameter": {0: ["sparse"], 2: []}}
"""What is asked of every fourth pair of sides beside the rest: patterns of parameters are found as others are."""
TABLE = [every(fw, source) for fw in FRAMEWORKS for source in ("argument", "parameter")]


@pytest.mark.parametrize(("fw", "source"), TABLE)
def test_every_read_of_a_jacobian_is_the_block_of_the_dense_one(fw, source):
    f, x, name = called(fw, turned, source)
    made = eg.jacobian(f, x, of=all_of("output"), wrt=all_of(name))
    own = functions.jacobian(fw.name, CASE).reshape(6, 6)
    for number, (out, into) in enumerate(PAIRS):
        of, wrt = positions(out, (3, 2)), positions(into, (2, 3))
        reads = READS[source].get(number % 4, ["blocks"])
        assert_every_read_is(fw, made[out][into], block(own, of, wrt), of.shape, wrt.shape, reads)


@pytest.mark.parametrize(("fw", "source"), TABLE)
def test_every_read_of_a_hessian_is_the_block_of_the_dense_one(fw, source):
    f, x, name = called(fw, total, source)
    made = eg.hessian(f, x, wrt=all_of(name))
    own = functions.hessian(fw.name, CASE).reshape(6, 6)
    for number, (out, into) in enumerate(PAIRS):
        of, wrt = positions(out, (2, 3)), positions(into, (2, 3))
        reads = READS[source].get(number % 4, ["blocks"])
        assert_every_read_is(fw, made[out][into], block(own, of, wrt), of.shape, wrt.shape, reads)


@pytest.mark.parametrize("fw", FRAMEWORKS, ids=lambda fw: fw.name)
def test_every_read_of_a_batch_is_the_block_of_the_dense_one(fw):
    made = eg.jacobian(
        lambda x: turned_each(OPS[fw.name], x), fw.tensor(EXAMPLES), of=all_of("output"), wrt=all_of("x"), batch=True
    )
    own_at = functions.derivative(fw.name, CASE)
    own = np.stack([own_at(example).reshape(6, 6) for example in EXAMPLES])
    for number, (out, into) in enumerate(PAIRS):
        of, wrt = positions(out, (3, 2)), positions(into, (2, 3))
        reads = ["blocks"] if number % 4 == 1 else []
        assert_every_read_is(fw, made[out][into], block(own, of, wrt), of.shape, wrt.shape, reads)


@pytest.mark.parametrize(("fw", "source"), TABLE)
def test_gradients_between_all_kinds_of_sides_are_the_blocks_of_the_dense_one(fw, source):
    f, x, name = called(fw, turned, source)
    own = functions.jacobian(fw.name, CASE).reshape(6, 6)
    for out, found in eg.grad(f, x, of=all_of("output"), wrt=all_of(name)).items():
        for into, gradient in found.items():
            expected = block(own, positions(out, (3, 2)), positions(into, (2, 3)))
            assert tuple(gradient.shape) == expected.shape
            np.testing.assert_allclose(fw.numpy(gradient), expected, **EXACT)
