"""The runs of `faulty_runs.py` on JAX."""

import jax
import jax.numpy as jnp
import optax

import elementgrad as eg
from tests.support.faulty_runs import BLOCKS, Case, batch_at, weights

OPTIMIZER = optax.adam(1e-3)


def forward(params, batch):
    h = batch["x"]
    for number in range(BLOCKS):
        a, b, c, d, e = [batch[name][:, number] for name in "abcde"]
        with jax.named_scope(f"block{number}"):
            h = h @ params[number]
            h = jnp.sqrt(jax.nn.softplus(h) * a)  # sqrt
            h = (h * b) / c  # divide
            h = jnp.exp(d - h)  # exp
            h = jnp.log(h + e)  # log
    return h


@jax.jit
def step(state, batch):
    params, moments = state
    loss, gradients = jax.value_and_grad(lambda params: jnp.square(forward(params, batch)).mean())(params)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), {"loss": loss}


def run(case: Case, capture: str):
    params = [jnp.asarray(w) for w in weights()]
    state = params, OPTIMIZER.init(params)
    name = f"state.0.{case.block}[{case.index[0]}]"
    rules = {name: lambda w: abs(w).max() > 1e3} if case.fault == "exploding" else "nonfinite"
    watched = eg.watch(step, capture=capture, when=rules)
    try:
        for number in range(case.steps):
            batch = {key: jnp.asarray(x) for key, x in batch_at(case, number).items()}
            if number == case.step and case.fault in ("inf in a parameter", "exploding"):
                value = jnp.inf if case.fault == "inf in a parameter" else 1e4
                state[0][case.block] = state[0][case.block].at[case.index].set(value)
            if number == case.step and case.fault == "optimizer":
                first, *rest = state[1]
                first.nu[case.block] = first.nu[case.block].at[case.index].set(-1.0)
                state = state[0], (first, *rest)
            state, _ = watched(state, batch)
    except eg.WatchError as error:
        return error, watched.replay()
    return None, None
