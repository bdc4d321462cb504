"""Gradients that are not there, on JAX."""


def message_usually():
    """Look at the gradient. JAX gives zeros where there is no path at all, and
    says nothing."""

    def loss(conv1):
        features = net(params | {"conv1": conv1}, image)
        return (jax.lax.stop_gradient(features) ** 2).mean()

    slope = jax.grad(loss)(params["conv1"])
    return jnp.abs(slope).max()


def message():
    """JAX has no such message: it gives zeros where something cut the path.
    `eg.explain` tells that from a zero, and names the line."""

    def loss(conv1):
        features = net(params | {"conv1": conv1}, image)
        features = jax.lax.stop_gradient(features)
        return (features**2).mean()

    told = eg.explain(loss, params["conv1"])
    return told.sentence, told.where, told.fix


def three_ways():
    """By index, by gather and by mask: the same gradient."""
    x = jnp.array([3.0, 4.0, 5.0])
    by_index = jax.grad(lambda x: x[0] ** 2)(x)
    by_gather = jax.grad(lambda x: (x[jnp.array([0])] ** 2).sum())(x)
    by_mask = jax.grad(
        lambda x: (x[np.array([True, False, False])] ** 2).sum()
    )(x)
    by_place = jax.grad(lambda x: eg.at(x)[0].get() ** 2)(x)
    return by_index, by_gather, by_mask, by_place


def element_zero():
    """`only` lets the gradient reach the element."""
    x = jnp.array([3.0, 4.0, 5.0])
    slope = jax.grad(lambda x: (eg.at(x)[0].only() ** 2).sum())(x)
    return slope


def choice_usually():
    """Take the element with the largest logit: nothing comes back from
    `argmax`, and so nothing is learned."""
    x, logits = jnp.array([3.0, 1.0, 2.0]), jnp.zeros(3)
    slope = jax.grad(lambda logits: (x[logits.argmax()] - 1.0) ** 2)(logits)
    return slope


def choice():
    """`choose` learns which element comes nearest to 1."""
    x, logits = jnp.array([3.0, 1.0, 2.0]), jnp.zeros(3)
    slope = jax.jit(jax.grad(lambda logits: (eg.choose(x, logits) - 1.0) ** 2))
    for _ in range(200):
        logits -= slope(logits)
    weights, chosen = jax.nn.softmax(logits), eg.choose(x, logits, hard=True)
    return weights, chosen
