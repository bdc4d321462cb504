"""No optimizer of optax, whatever its options, changes a bit outside of the elements that train."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import elementgrad as eg
from tests.support.jax_losses import SMALL, assert_only, bits, small, small_loss

optax = pytest.importorskip("optax", reason="the oldest packages come without optax")
pytestmark = pytest.mark.filterwarnings("ignore:.*optimistic_adam:DeprecationWarning")
PLACES = SMALL[1:3]
STEPS = 100
CLIPPED = [
    optax.identity(),
    optax.clip(0.1),
    optax.clip_by_global_norm(0.1),
    optax.adaptive_grad_clip(0.1),
]
OPTIONS = {
    "sgd": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}],
    "adam": [{}, {"nesterov": True}],
    "rmsprop": [{}, {"momentum": 0.9, "centered": True}],
    "lbfgs": [{"linesearch": None}],  # the search along a line takes half a minute to compile
}
"""What is asked of some, beside their defaults."""
CONTRIBUTED = ["adopt", "cocob", "dog", "madgrad", "momo_adam", "muon", "prodigy", "schedule_free_adamw"]


def makers():
    """All that optax calls its optimizers, and some that others gave to it."""
    aliases = {
        name: maker
        for name, maker in vars(optax).items()
        if getattr(maker, "__module__", "") == "optax._src.alias" and inspect.isfunction(maker)
    }
    return aliases | {name: getattr(optax.contrib, name) for name in CONTRIBUTED if hasattr(optax.contrib, name)}


def made(maker, options, decay):
    """An optimizer with weight decay, its own where it has one."""
    known = inspect.signature(maker).parameters
    own = next((option for option in ("weight_decay", "weight_decay_rate") if option in known), None)
    usual = {"learning_rate": 0.01, "key": 0, own: decay}
    made = maker(**{option: value for option, value in usual.items() if option in known} | options)
    return optax.with_extra_args_support(made if own else optax.chain(optax.add_decayed_weights(decay), made))


def test_every_optimizer_with_decay_and_clipping_changes_no_bit_outside_of_the_places():
    found = makers()
    assert {"adam", "adamw", "lamb", "lars", "lion", "adafactor", "sm3", "noisy_sgd", "polyak_sgd"} <= found.keys()
    params = small()
    elements = eg.trainable(params, PLACES)
    cases = {f"{name} {options}": (maker, options) for name, maker in found.items() for options in options_of(name)}

    def heard(way, values):
        loss, slope = elements.value_and_grad(small_loss, values)
        ways = [clip.update(slope, clip.init(values), values)[0] for clip in CLIPPED]
        return loss, jax.tree.map(lambda *each: jnp.stack(each)[way], *ways)

    def run(way, decay):
        """All optimizers at once, with one way of clipping and one weight decay: one program for the whole table."""
        optimizers = {case: made(*cases[case], decay) for case in cases}

        def step(carried, _):
            stacked = jax.tree.map(lambda *each: jnp.stack(each), *[values for values, _ in carried.values()])
            losses, slopes = jax.vmap(partial(heard, way))(stacked)
            after = {}
            for number, (case, (values, state)) in enumerate(carried.items()):
                slope = jax.tree.map(lambda each, number=number: each[number], slopes)
                updates, state = optimizers[case].update(slope, state, values, value=losses[number], grad=slope)
                after[case] = optax.apply_updates(values, updates), state
            return after, None

        start = {case: (elements.values, one.init(elements.values)) for case, one in optimizers.items()}
        carried, _ = jax.lax.scan(step, start, length=STEPS)
        return {case: values for case, (values, _) in carried.items()}

    ways, decays = np.meshgrid(np.arange(len(CLIPPED)), np.float32([0, 0.1]))
    every = jax.jit(jax.vmap(run))(ways.reshape(-1), decays.reshape(-1))
    merge = jax.jit(elements.merge)
    for case, stacked in every.items():
        for number in range(ways.size):
            values = jax.tree.map(lambda each, number=number: each[number], stacked)
            assert_only(elements, merge(values), params)
            assert any(bits(x) != bits(y) for x, y in zip(values.values(), elements.values.values(), strict=True)), case
            if not case.startswith("lbfgs"):  # which needs its search to be steady
                assert all(np.isfinite(x).all() for x in values.values()), case


def options_of(name):
    return OPTIONS.get(name, [{}])


def test_other_parameters_train_beside_with_an_optimizer_of_their_own():
    params = small()
    elements = eg.trainable(params, PLACES)
    both = {"elements": elements.values, "bias": params["head"]["bias"]}
    optimizer = optax.multi_transform(
        {"elements": optax.adamw(0.1, weight_decay=0.1), "bias": optax.sgd(0.1)},
        {"elements": "elements", "bias": "bias"},
    )

    def whole(params, bias):
        return {**params, "head": {**params["head"], "bias": bias}}

    @jax.jit
    def step(both, state):
        of_elements = elements.grad(small_loss, both["elements"], params=whole(params, both["bias"]))
        merged = elements.merge(both["elements"])
        of_bias = jax.grad(lambda bias: small_loss(whole(merged, bias)))(both["bias"])
        updates, state = optimizer.update({"elements": of_elements, "bias": of_bias}, state, both)
        return optax.apply_updates(both, updates), state

    state, before = optimizer.init(both), small_loss(params)
    for _ in range(20):
        both, state = step(both, state)
    merged = elements.merge(both["elements"], params=whole(params, both["bias"]))
    assert small_loss(merged) < before
    assert (merged["head"]["bias"] != params["head"]["bias"]).all()
    assert_only(elements, whole(merged, params["head"]["bias"]), params)
