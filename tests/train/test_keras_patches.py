"""Patched attributes are restored exactly: methods of layers of every sort,
what was inherited, and what could be replaced only in part."""

import gc
import inspect
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import elementgrad as eg
from elementgrad._cleanup import AttributePatch, scope

X = tf.constant([[1.0, -2.0, 0.5]])


@contextmanager
def installed(patch: AttributePatch, *of: Any) -> Iterator[None]:
    with scope():
        patch.enter(*of)
        yield


class Base:
    def method(self) -> str:
        return "own"


class Derived(Base):
    @staticmethod
    def static() -> str:
        return "own"


def test_attributes_are_back_as_they_stood():
    before = dict(vars(Derived))

    def install(replace: Any) -> None:
        replace(Derived, "method", lambda self: "new")
        replace(Derived, "static", lambda: "new")

    with AttributePatch(install).on():
        assert Derived().method() == Derived.static() == "new"
        assert Base().method() == "own"
    assert dict(vars(Derived)) == before
    assert Derived().method() == Derived().static() == "own"


def test_a_partial_replacement_is_undone():
    before = dict(vars(Derived))

    def install(replace: Any) -> None:
        replace(Derived, "static", None)
        if broken:
            raise RuntimeError("half-way")

    patch, broken = AttributePatch(install), True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="half-way"), installed(patch):
            pass
        assert dict(vars(Derived)) == before
    broken = False
    with installed(patch):
        assert Derived.static is None
    assert dict(vars(Derived)) == before


def test_many_threads_share_a_replacement_and_the_last_takes_it_back():
    installed: list[type] = []

    def install(replace: Any, owner: type) -> None:
        installed.append(owner)
        replace(owner, "method", lambda self: "new")

    patch = AttributePatch(install)
    seen, all_in = [], threading.Barrier(4)

    def use() -> None:
        with installed(patch, Derived), installed(patch, Base):
            all_in.wait(10)
            seen.append(Derived().method() + Base().method())
            all_in.wait(10)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["newnew"] * 4
    assert sorted(installed, key=str) == [Base, Derived]
    assert Derived().method() == Base().method() == "own"


def test_a_patched_class_is_freed_with_its_last_user():
    patch = AttributePatch(lambda replace, owner: replace(owner, "method", None))

    def use() -> Any:
        class Short(Base):
            pass

        with installed(patch, Short):
            return weakref.ref(Short)

    gone = use()
    gc.collect()
    assert gone() is None


class Static(keras.layers.Layer):
    @staticmethod
    def call(x: Any) -> Any:
        return x * 3


class OfClass(keras.layers.Layer):
    factor = 3

    @classmethod
    def call(cls, x: Any) -> Any:
        return x * cls.factor


class Tripled:
    def __call__(self, x: Any) -> Any:
        return x * 3


class OfObject(keras.layers.Layer):
    call = Tripled()


class Compiled(keras.layers.Layer):
    @tf.function
    def call(self, x: Any) -> Any:
        return x * 3


class Inherited(Static):
    pass


class ByClass(keras.layers.Layer):
    """Calls a method of another class that takes no layer."""

    def call(self, x: Any) -> Any:
        assert_takes_a_tensor(Static.call)
        return Static.call(x)


def assert_takes_a_tensor(method: Any) -> None:
    assert list(inspect.signature(method).parameters) == ["x"]


@pytest.mark.parametrize("kind", [Static, OfClass, OfObject, Compiled, Inherited, ByClass])
def test_layers_whose_call_is_no_plain_method(kind):
    before = [vars(owner).get("call") for owner in (kind, Static)]
    model = keras.Sequential([keras.layers.Dense(3, name="d"), kind(name="k"), Static(name="s")])
    for _ in range(2):
        assert [row.name for row in eg.names(model, X) if row.kind == "activation"] == ["d", "k", "s"]
        np.testing.assert_allclose(eg.grad(model, X, of="output[0, 1]", wrt="k[0]"), [0, 3, 0])
        np.testing.assert_allclose(eg.grad(model, X, of="k[0, 1]", wrt="d[0]"), [0, 3, 0])
        assert [vars(owner).get("call") for owner in (kind, Static)] == before
    np.testing.assert_allclose(kind()(X), 3 * X)


def test_layers_made_in_a_run_keep_their_own_call():
    class Making(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            layer = Static()
            assert_takes_a_tensor(layer.call)
            return layer(x)

    model = keras.Sequential([Making(name="making"), Static(name="s")])
    np.testing.assert_allclose(eg.grad(model, X, of="output[0, 1]", wrt="making[0]"), [0, 3, 0])
