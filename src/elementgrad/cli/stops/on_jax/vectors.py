"""One element of a vector, on JAX."""


def replaced_usually():
    """Assign to it."""
    v = jnp.array([1.0, 2.0, 3.0, 4.0])
    v[2] = 10.0
    return v


def replaced():
    """`set` gives a new array, as `v.at[2].set` does. The gradient of the old
    element is 0, and the value has its own."""
    v = jnp.array([1.0, 2.0, 3.0, 4.0])

    new = eg.at(v)[2].set(10.0)
    total = lambda v, value: eg.at(v)[2].set(value).sum()
    of_sum = jax.grad(total, (0, 1))(v, 10.0)

    squares = lambda v, value: (eg.at(v)[0].set(value) ** 2).sum()
    loss, of_loss = jax.value_and_grad(squares, (0, 1))(v, 7.0)
    return new, of_sum, loss, of_loss


def alone_usually():
    """Multiply by a mask. A NaN somewhere else comes through all the same."""
    v = jnp.array([1.0, 2.0, 3.0, jnp.nan])
    mask = jnp.array([0.0, 0.0, 1.0, 0.0])
    slope = jax.grad(lambda v: ((v * mask) ** 2).sum())(v)
    return slope


def alone():
    """`only` has all values of v, and the gradient of the element you name."""
    v = jnp.array([1.0, 2.0, 3.0, 4.0])
    slope = jax.grad(lambda v: (eg.at(v)[2].only() ** 2).sum())(v)
    return slope


def stepped_usually():
    """Replace the element first. Then its own gradient is 0, and every other
    element moves: the wrong way round."""
    v = jnp.array([1.0, 2.0, 3.0, 4.0])
    slope = jax.grad(lambda v: (v.at[1].set(2.0) ** 2).sum())(v)
    return v - 0.1 * slope


def stepped():
    """Keep the vector as it is and let the gradient reach element 1 alone."""
    v = jnp.array([1.0, 2.0, 3.0, 4.0])
    slope = jax.grad(lambda v: (eg.at(v)[1].only() ** 2).sum())(v)
    return v - 0.1 * slope
