"""What a function caches while it is recorded does not stay behind as a tensor without numbers."""

from collections import deque
from functools import lru_cache
from types import SimpleNamespace
from weakref import WeakKeyDictionary, proxy

import numpy as np
import pytest

import elementgrad as eg

_kept = None


def in_a_dict(compute):
    cache = {}
    return lambda x: x * cache.setdefault("y", compute(x))


def in_a_list(compute):
    cache = []

    def f(x):
        if not cache:
            cache.append([compute(x)])
        return x * cache[0][0]

    return f


def in_a_deque(compute):
    cache = deque(maxlen=2)

    def f(x):
        cache.append(compute(x))
        return x * cache[0]

    return f


def in_a_variable_around_it(compute):
    kept = None

    def f(x):
        nonlocal kept
        kept = compute(x) if kept is None else kept
        return x * kept

    return f


def in_a_global(compute):
    global _kept
    _kept = None

    def f(x):
        global _kept
        _kept = compute(x) if _kept is None else _kept
        return x * _kept

    return f


class Holder:
    kept = None


def in_an_attribute(compute):
    holder = Holder()

    def f(x):
        holder.kept = compute(x) if holder.kept is None else holder.kept
        return x * holder.kept

    return f


def in_a_class(compute):
    class Cache:
        kept = None

    def f(x):
        Cache.kept = compute(x) if Cache.kept is None else Cache.kept
        return x * Cache.kept

    return f


def in_the_function_itself(compute):
    def f(x):
        f.kept = getattr(f, "kept", None)
        f.kept = compute(x) if f.kept is None else f.kept
        return x * f.kept

    return f


class SlotHolder:
    __slots__ = ("kept",)


def in_a_slot(compute):
    holder = SlotHolder()

    def f(x):
        if not hasattr(holder, "kept"):
            holder.kept = compute(x)
        return x * holder.kept

    return f


def in_a_namespace(compute):
    names = SimpleNamespace()

    def f(x):
        names.kept = getattr(names, "kept", None)
        names.kept = compute(x) if names.kept is None else names.kept
        return x * names.kept

    return f


def in_a_weak_dict(compute):
    owner = Holder()
    cache = WeakKeyDictionary()

    def f(x):
        if owner not in cache:
            cache[owner] = compute(x)
        return x * cache[owner]

    return f


class Model:
    """A callable object, as a model without a framework is."""

    def __init__(self, compute):
        self.compute, self.calls, self.kept = compute, 0, {}

    def __call__(self, x):
        self.calls += 1
        self.kept.setdefault("y", self.compute(x))
        return x * self.kept["y"]


CACHES = [
    in_a_dict,
    in_a_list,
    in_a_deque,
    in_a_variable_around_it,
    in_a_global,
    in_an_attribute,
    in_a_class,
    in_the_function_itself,
    in_a_slot,
    in_a_namespace,
    in_a_weak_dict,
    Model,
]


@pytest.mark.parametrize("cone", [True, None])
@pytest.mark.parametrize("make", CACHES, ids=lambda make: make.__name__)
def test_what_is_cached_has_numbers_in_the_next_call(fw, make, cone):
    numbers = np.linspace(-1, 1, 120_000).reshape(300, 400)
    x = fw.tensor(numbers)
    f = make(lambda x: x * x + 1)
    first = eg.grad(f, x, of="output[3, 4]", wrt="x[3, 2:6]", cone=cone)
    found = fw.numpy(first)
    assert found[2] == pytest.approx(3 * numbers[3, 4] ** 2 + 1)  # computed by this call, and differentiated
    assert not found[[0, 1, 3]].any()
    np.testing.assert_allclose(fw.numpy(f(x)), numbers * (numbers**2 + 1))


def test_a_weak_proxy_of_an_object_that_is_gone_does_no_harm(fw):
    model = Model(lambda x: x * x)
    model.parent = proxy(Holder())
    numbers = np.linspace(-1, 1, 120_000).reshape(300, 400)
    gradient = eg.grad(model, fw.tensor(numbers), of="output[3, 4]", wrt="x[3, 4]")
    assert float(gradient) == pytest.approx(3 * numbers[3, 4] ** 2)


def test_results_of_an_lru_cache_have_numbers_in_the_next_call(fw):
    factors = fw.tensor(np.arange(400.0))

    @lru_cache
    def scaled(factor):
        return factors * factor

    numbers = np.linspace(-1, 1, 120_000).reshape(300, 400)
    for cone in (True, None):
        f = lambda x: x * scaled(2.0)  # noqa: E731
        gradient = eg.grad(f, fw.tensor(numbers), of="output[3, 4]", wrt="x[3, 4]", cone=cone)
        assert float(gradient) == 8
        np.testing.assert_allclose(fw.numpy(f(fw.tensor(numbers))), numbers * np.arange(400) * 2)
        np.testing.assert_array_equal(fw.numpy(scaled(2.0)), np.arange(400) * 2)
        scaled.cache_clear()
