"""The stops of the tour on JAX."""

from collections.abc import Callable
from typing import Any

import elementgrad as eg

jax: Any = None  # imported when the tour starts
jnp: Any = None
optax: Any = None


def replace_an_element() -> dict[str, Any]:
    """Replace element 2 by a value and differentiate the sum."""
    v, value = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array(10.0)
    new = eg.at(v)[2].set(value)
    slopes = jax.grad(lambda v, value: eg.at(v)[2].set(value).sum(), (0, 1))(v, value)
    return {"new": new, "slopes[0]": slopes[0], "slopes[1]": slopes[1]}


def replace_and_square() -> dict[str, Any]:
    """Replace element 0 by a value and differentiate the sum of squares."""
    v, value = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array(7.0)
    loss, slopes = jax.value_and_grad(lambda v, value: (eg.at(v)[0].set(value) ** 2).sum(), (0, 1))(v, value)
    return {"loss": loss, "slopes[0]": slopes[0], "slopes[1]": slopes[1]}


def one_element_alone() -> dict[str, Any]:
    """Get the gradient of one element alone, all others zero."""
    v = jnp.array([1.0, 2.0, 3.0, 4.0])
    slope = jax.grad(lambda v: (eg.at(v)[2].only() ** 2).sum())(v)
    return {"slope": slope}


def one_step_on_one_element() -> dict[str, Any]:
    """Take one gradient step (learning rate 0.1) on element 1 and move nothing else."""
    v = jnp.array([1.0, 2.0, 3.0, 4.0])
    moved = v - 0.1 * jax.grad(lambda v: (eg.at(v)[1].only() ** 2).sum())(v)
    return {"moved": moved}


def the_published_answer() -> dict[str, Any]:
    """Beware the usual answer: replace the element first, and every *other* element moves."""
    v = jnp.array([1.0, 2.0, 3.0, 4.0])
    moved = v - 0.1 * jax.grad(lambda v: (v.at[1].set(2.0) ** 2).sum())(v)
    return {"moved": moved}


def element_of_a_product() -> dict[str, Any]:
    """Differentiate one element of a matrix product."""
    X, Y = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[5.0, 6.0], [7.0, 8.0]])
    J = eg.jacobian(lambda X, Y: X @ Y, X, Y, wrt="X")
    return {"J[(0, 0), :]": J[(0, 0), :], "J[(0, 0), (0, 1)]": J[(0, 0), (0, 1)]}


def train_one_entry() -> dict[str, Any]:
    """Train one entry of a 100 x 10 embedding, under AdamW with weight decay: nothing else moves by a bit."""
    keys = jax.random.split(jax.random.key(0))
    params = {"table": jax.random.normal(keys[0], (100, 10)), "head": jax.random.normal(keys[1], (10, 2))}
    elements = eg.trainable(params, "table[0, 5]")
    optimizer, values = optax.adamw(0.1, weight_decay=0.1), elements.values
    state = optimizer.init(values)
    for _ in range(5):
        gradient = elements.grad(lambda params: ((params["table"] @ params["head"]) ** 2).sum(), values)
        updates, state = optimizer.update(gradient, state, values)
        values = optax.apply_updates(values, updates)
    moved = {name: jnp.argwhere(new != params[name]) for name, new in elements.merge(values).items()}
    return {'moved["table"]': moved["table"], 'moved["head"]': moved["head"]}


def the_usual_mask() -> dict[str, Any]:
    """Beware the usual answer, a mask on the gradient: weight decay moves the other 999 as well."""
    table, mask = jax.random.normal(jax.random.key(0), (100, 10)), jnp.zeros((100, 10)).at[0, 5].set(1.0)
    before, optimizer = table, optax.adamw(0.1, weight_decay=0.1)
    state = optimizer.init(table)
    for _ in range(5):
        updates, state = optimizer.update(jax.grad(lambda table: (table**2).sum())(table) * mask, state, table)
        table = optax.apply_updates(table, updates)
    leaked = ((table != before) & (mask == 0)).sum()
    return {"leaked": leaked}


def an_entry_of_a_sequence_model() -> dict[str, Any]:
    """Train entry [0, 12] of a recurrent model's embedding for one output token; unseen, its gradient is 0."""
    params = recurrent(jax.random.key(0))
    elements = eg.trainable(params, "table[0, 12]")

    def gradient(*tokens: int) -> Any:
        return elements.grad(lambda params: -scores(params, jnp.array(tokens))[2])["table[0, 12]"]

    return {"gradient(7, 0, 3)": gradient(7, 0, 3), "gradient(7, 4, 3)": gradient(7, 4, 3)}


def each_entry_its_loss() -> dict[str, Any]:
    """Two entries, each with its own target token: neither hears the loss of the other, as it would of their sum."""
    params, tokens = recurrent(jax.random.key(0)), jnp.array([7, 0, 1])
    elements = eg.trainable(params, ["table[0, 12]", "table[1, 25]"])
    routed = elements.grad(
        {
            "table[0, 12]": lambda params: -scores(params, tokens)[2],
            "table[1, 25]": lambda params: -scores(params, tokens)[5],
        }
    )
    summed = elements.grad(lambda params: -scores(params, tokens)[2] - scores(params, tokens)[5])
    routed, summed = jnp.concatenate([*routed.values()]), jnp.concatenate([*summed.values()])
    return {"routed": routed, "summed": summed}


def recurrent(key: Any) -> dict[str, Any]:
    """The parameters of a GRU between an embedding of 50 tokens and a score for each of them."""
    sizes = {"table": (50, 32), "into": (32, 192), "again": (64, 192), "head": (64, 50)}
    keys = jax.random.split(key, len(sizes))
    return {name: 0.1 * jax.random.normal(key, shape) for key, (name, shape) in zip(keys, sizes.items(), strict=True)}


def scores(params: Any, tokens: Any) -> Any:
    """What the model gives each token to come after some, as a logarithm."""

    def cell(state: Any, token: Any) -> Any:
        into, again = token @ params["into"], state @ params["again"]
        reset, update = jax.nn.sigmoid(into[:64] + again[:64]), jax.nn.sigmoid(into[64:128] + again[64:128])
        new = jnp.tanh(into[128:] + reset * again[128:])
        return update * state + (1 - update) * new, None

    state, _ = jax.lax.scan(cell, jnp.zeros(64), params["table"][tokens])
    return jax.nn.log_softmax(state @ params["head"])


STOPS: tuple[Callable[[], dict[str, Any]], ...] = (
    replace_an_element,
    replace_and_square,
    one_element_alone,
    one_step_on_one_element,
    the_published_answer,
    element_of_a_product,
    train_one_entry,
    the_usual_mask,
    an_entry_of_a_sequence_model,
    each_entry_its_loss,
)
