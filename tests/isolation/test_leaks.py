"""Verbs x frameworks: after many calls nothing is left of them, and what a result holds is free once that is gone."""

import contextlib
import gc
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

import elementgrad as eg
from tests.support import user_jax, user_keras, user_torch
from tests.support.frameworks import TENSORFLOW
from tests.support.user import JACOBIAN_READS

X = np.array([[0.1, 0.2, 0.3], [0.7, -0.4, 0.9]])
CALLS = {user_torch: 30, user_keras: 10, user_jax: 10}
"""A leak of one object per call shows after a few; TensorFlow and JAX trace functions anew in every call."""
VERBS = {
    user_torch: [
        *("grad", "activation", "jacobian: row", "jacobian: whole", "contributions", "names", "record a block"),
        *("top", "explain", "check", "sparse", "prepare", "hessian: row"),
    ],
    user_keras: ["grad", "activation", "jacobian: row", "contributions", "top", "record a block", "explain"],
    user_jax: ["grad", "activation", "jacobian: row", "contributions", "train", "explain"],
}

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")


@contextlib.contextmanager
def without_collector():
    """Free what nothing refers to any more, and nothing that waits for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def hooks():
    homes = (modules, optimizers)
    return {key: len(value) for home in homes for key, value in vars(home).items() if key.endswith("_hooks")}


def held():
    """Count the tensors, the objects of the library and the hooks that there are."""
    gc.collect()
    kinds = (type(x) for x in gc.get_objects())
    mine = (
        kind for kind in kinds if str(kind.__module__).split(".")[0] in ("elementgrad", "torch", "jaxlib", "tensorflow")
    )
    return Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in mine)


@pytest.mark.parametrize(
    ("module", "verb"),
    [(module, verb) for module, verbs in VERBS.items() for verb in verbs],
    ids=lambda value: value if isinstance(value, str) else value.NAME,
)
def test_many_calls_leak_no_more_than_a_few(module, verb):
    user, call, times = module.User(), module.VERBS[verb], CALLS[module]
    for _ in range(3):  # what is made once and kept for all is no leak
        call(user)()
    before, registered = held(), hooks()
    for _ in range(times):
        call(user)()
    grown = {kind: count for kind, count in (held() - before).items() if count >= times}
    assert grown == {}
    assert hooks() == registered


@pytest.mark.parametrize("reads", [[], ["row"], ["column"], ["rows", "columns", "whole"]], ids=str)
def test_a_freed_jacobian_frees_its_memory(fw, reads):
    if fw is TENSORFLOW and len(reads) > 1:
        return  # a tf.function holds what it has captured until the garbage collector comes, whoever made it

    def make():
        large = fw.tensor(np.arange(6.0).reshape(2, 3))
        return (lambda x: x * large * fw.sum(x)), weakref.ref(large)

    for read in reads:  # what is made once and kept for all is no leak
        JACOBIAN_READS[read](eg.jacobian(make()[0], fw.tensor(X)))
    with without_collector():
        f, alive = make()
        J = eg.jacobian(f, fw.tensor(X))
        for read in reads:
            JACOBIAN_READS[read](J)
        del f, J
        assert alive() is None


def test_the_graph_of_pytorch_is_free_once_the_jacobian_is_gone():
    alive = []

    def f(x):
        h = x.exp()
        alive.append(weakref.ref(h))
        return h * h

    with without_collector():
        J = eg.jacobian(f, torch.tensor(X))
        J[(0, 0), :], J.dense()
        assert alive[0]() is not None
        del J
        assert all(ref() is None for ref in alive)


def test_no_memory_is_kept_when_a_recording_is_gone():
    x = torch.ones(1000)
    kept = [weakref.ref(x)]
    with eg.record(x) as rec:
        x[3] = (x * x).exp().sum()
        y = x.sin().sum()
        kept.append(weakref.ref(x.cos()))
    rec.grad(y, x)
    recorder = weakref.ref(rec._recorder)
    with without_collector():
        del rec
        assert recorder() is None
        del x
        assert kept[0]() is None
    assert y.requires_grad


def test_a_tag_holds_no_reference_to_its_name(fw):
    class Name(str):
        """A text with weak references."""

    x, name = fw.tensor(X), Name("step_17")
    alive = weakref.ref(name)
    eg.tag(x, name)
    del name
    assert alive() is None
