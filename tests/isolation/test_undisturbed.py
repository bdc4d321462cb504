"""Verbs x frameworks x {returns, raises}: nothing of the user's is disturbed.

The modules `tests.support.user_*` have the verbs, and a model, an argument and code of a user's with everything about
them and about the framework that a verb might change: gradients, `requires_grad`, hooks, modes, buffers, random
numbers, defaults. A verb is a function that does its first step and returns the last one.
"""

import contextlib

import pytest
import torch

import elementgrad as eg
from tests.support import user_jax, user_keras, user_torch

USERS = {"torch": user_torch, "keras": user_keras, "jax": user_jax}
VERBS = [(framework, verb) for framework, module in USERS.items() for verb in module.VERBS]


class MineError(RuntimeError, ValueError):
    """An error of the user's own."""


KINDS = [MineError, KeyboardInterrupt]
LIVE = {"record"}
"""These run the code of the user as it is, and what that leaves is the user's."""
AT_ONCE = [row for row in VERBS if row[1] not in LIVE | {"sparse"} or row == ("jax", "sparse")]
"""These come by code that raises in the forward."""
FORWARD_ONLY = {
    *("names", "pattern", "no pattern", "explain-cut", "explain: detach", "check", "record a block", "audit-cut"),
    *("value", "field"),
}
ON_THE_WAY_BACK = [
    row for row in AT_ONCE if row[1] not in FORWARD_ONLY and row not in (("jax", "hessian"), ("jax", "explain"))
]
"""These come by code that raises in the derivative, in their last step; on JAX a Hessian does so in its first, and an
explanation says that there is no derivative."""
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")


def assert_undisturbed(user, before, verb):
    for name, value in user.state().items():
        if name == "fired hooks" and verb.startswith(("explain", "record", "audit")):
            continue  # hooks of a tensor that is explained or recorded say what becomes of its gradient
        assert value == before[name], name


@contextlib.contextmanager
def raising(user, when, kind):
    """Expect the error that the code of the user raises; TensorFlow and JAX may put it into one of their own."""
    error = user.fail(when, kind)
    with pytest.raises((kind, eg.ElementgradError)) as caught:
        yield
    user.recover()
    if isinstance(user, user_torch.User):
        assert caught.value is error
    found = caught.value
    while found is not None and "mine" not in str(found):
        found = found.__cause__ or found.__context__
    assert found is not None


@pytest.mark.parametrize(("framework", "verb"), VERBS)
def test_a_verb_that_returns_disturbs_nothing(framework, verb):
    user = USERS[framework].User()
    before = user.state()
    last = USERS[framework].VERBS[verb](user)
    assert_undisturbed(user, before, verb)
    last()
    assert_undisturbed(user, before, verb)
    del last
    assert_undisturbed(user, before, verb)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("framework", "verb", "when"),
    [(*row, "at once") for row in AT_ONCE] + [(*row, "half-way") for row in VERBS if row[1].startswith("top: ")],
)
def test_a_verb_disturbs_nothing_when_the_function_raises(framework, verb, when, kind):
    user = USERS[framework].User()
    before = user.state()
    with raising(user, when, kind):
        USERS[framework].VERBS[verb](user)()
    assert_undisturbed(user, before, verb)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("framework", "verb"), ON_THE_WAY_BACK)
def test_a_verb_disturbs_nothing_when_the_derivative_raises_and_works_afterwards(framework, verb, kind):
    user = USERS[framework].User(fragile=True)
    before = user.state()
    last = USERS[framework].VERBS[verb](user)
    with raising(user, "on the way back", kind):
        last()
    assert_undisturbed(user, before, verb)
    last()
    assert_undisturbed(user, before, verb)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["enable_grad", "no_grad", "inference_mode"])
def test_a_mode_of_pytorch_is_the_one_it_was_when_the_function_raises_under_it(mode, kind):
    user = user_torch.User()
    before = user.state()
    with getattr(torch, mode)():
        around = user_torch.surroundings()
        with raising(user, "at once", kind):
            user_torch.VERBS["jacobian: row"](user)()
        assert user_torch.surroundings() == around
    assert_undisturbed(user, before, "jacobian: row")


class Doubled(torch.autograd.Function):
    """Its reverse rule has no derivative, so that a column runs the function again."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return 2 * g

    @staticmethod
    def jvp(ctx, tangent):
        return 2 * tangent


def test_a_second_run_of_the_function_that_is_interrupted_disturbs_nothing():
    user = user_torch.User()
    before = user.state()
    J = eg.jacobian(lambda x: Doubled.apply(user.model(x)), user.x)
    with raising(user, "at once", KeyboardInterrupt):
        J[:, (0, 0)]
    assert_undisturbed(user, before, "jacobian: column")


def test_hooks_of_the_user_fire_once_in_their_own_backward():
    user = user_torch.User()
    eg.jacobian(user.model, user.x).dense()
    user.model(user.x).sum().backward()
    assert sorted(user.fired) == ["accumulated", "argument", "parameter"]
