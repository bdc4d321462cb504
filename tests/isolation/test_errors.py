"""Errors of the user's own function come through as they were raised, with no errors of the library beside them."""

import jax
import jax.numpy as jnp
import pytest
import tensorflow as tf
import torch

import elementgrad as eg


class InnerError(Exception):
    pass


class UserError(Exception):
    pass


def raise_alone():
    raise UserError


def raise_with_cause():
    raise UserError from InnerError()


def raise_in_handler():
    try:
        raise InnerError
    except InnerError:
        raise UserError  # noqa: B904


def chain(error):
    """Return the kinds of an error and of those that Python prints with it."""
    kinds = []
    while error is not None:
        kinds.append(type(error).__name__)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return kinds


WAYS = {
    raise_alone: ["UserError"],
    raise_with_cause: ["UserError", "InnerError"],
    raise_in_handler: ["UserError", "InnerError"],
}
VERBS = {
    "grad": lambda f, x: eg.grad(f, x, of="output[0]"),
    "column": lambda f, x: eg.jacobian(f, x)[:, 0],
    "value": lambda f, x: eg.value(f, x, of="output[0]"),
    "explain": lambda f, x: eg.explain(f, x, of="output[0]"),
    "check": lambda f, x: eg.check(f, x, of="output[0]"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_an_error_of_the_function_keeps_its_kind_cause_and_context(fw, verb):
    for fail, kinds in WAYS.items():
        with pytest.raises(UserError) as raised:
            VERBS[verb](lambda x, fail=fail: fail(), fw.tensor([0.25, 0.75]))
        assert chain(raised.value) == kinds


def test_an_error_of_a_later_run_is_raised_once():
    runs = []

    def f(x):
        runs.append(x)
        if len(runs) > 1:
            raise UserError
        return 2 * x

    with pytest.raises(UserError) as raised:
        eg.check(f, torch.ones(2), of="output[0]")
    assert chain(raised.value) == ["UserError"]


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, number):
        raise UserError

    @staticmethod
    def backward(ctx, gradient):
        return None


class FailsWhenUntracked:
    """PyTorch refuses to freeze a tensor that has a graph, and the function runs again in a way that allows it."""

    def __init__(self):
        self.runs = 0

    def __call__(self, x):
        self.runs += 1
        if self.runs == 2:
            raise UserError
        return (x * 1).requires_grad_(False).sum()


@jax.custom_jvp
def looks_at_its_values(x):
    if x[0] > 0:
        raise UserError
    return x.sum()


looks_at_its_values.defjvp(lambda xs, tangents: (xs[0].sum(), tangents[0].sum()))


@tf.function
def runs_only_compiled(x):
    assert not tf.executing_eagerly()
    raise UserError


RUN_AGAIN = {
    "torch: a function without tensors": (lambda x: Failing.apply(2.0), lambda: torch.ones(2)),
    "torch: a frozen tensor": (FailsWhenUntracked(), lambda: torch.ones(2)),
    "jax: a rule of its own": (looks_at_its_values, lambda: jnp.ones(2)),
    "tensorflow: a compiled function": (runs_only_compiled, lambda: tf.ones(2)),
}


@pytest.mark.parametrize("case", RUN_AGAIN)
def test_an_error_of_a_second_run_is_raised_without_the_first(case):
    f, make = RUN_AGAIN[case]
    with pytest.raises(UserError) as raised:
        (eg.grad if "frozen" in case else eg.explain)(f, make())
    assert chain(raised.value) == ["UserError"]
