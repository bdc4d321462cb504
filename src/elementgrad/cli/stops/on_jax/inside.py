"""An element that makes another of the same array, on JAX."""


def twice():
    """Vectorised operations hide nothing: it is w[2]. And a question changes
    nothing, so that asking again gives the same."""
    x, w = jnp.array([1.0, 2.0, 3.0]), jnp.array([4.0, 5.0, 6.0])
    J = eg.jacobian(lambda x: (x * w).sum(), x)
    first, again = J[..., 2], J[..., 2]
    return first, again


def uses():
    """One share for each use of the element; they add up to the derivative."""
    x = jnp.array([1.0, 2.0, 3.0])
    shares = eg.contributions(lambda x: 2 * x[2] + x.sum(), x, wrt="x[2]")
    direct, through_sum = (share.value for share in shares)
    return direct, through_sum, shares.total


def own_rule_usually():
    """Give one gradient for the array, and none for the index."""

    @jax.custom_vjp
    def weighted(x, i):
        return 3 * x[i] + x.sum()

    def forward(x, i):
        return weighted(x, i), (x, i)

    def backward(saved, g):
        x, i = saved
        return g * jnp.ones_like(x).at[i].add(3.0)

    weighted.defvjp(forward, backward)
    slope = jax.grad(weighted)(jnp.array([1.0, 2.0, 3.0]), 2)
    return slope[2]


def own_rule():
    """One gradient for each argument, and None for an index. `eg.check` holds
    the rule against differences."""

    @jax.custom_vjp
    def weighted(x, i):
        return 3 * x[i] + x.sum()

    def forward(x, i):
        return weighted(x, i), (x, i)

    def backward(saved, g):
        x, i = saved
        return g * jnp.ones_like(x).at[i].add(3.0), None

    weighted.defvjp(forward, backward)
    x = jnp.array([1.0, 2.0, 3.0])
    slope = eg.grad(lambda x: weighted(x, 2), x, wrt="x[2]")
    verdict = eg.check(lambda x: weighted(x, 2), x).verdict
    return slope, verdict


def written_usually():
    """Differentiate by t and look at element 1. But that is the t[1] of the
    start, which is written over."""

    def program(t):
        t = t.at[1].set(2 * t[0])
        t = t.at[3].set(t[1] ** 2 + t[0])
        return t.at[4].set(t[3] * t[1])

    start = jnp.array([3.0, 0.0, 0.0, 0.0, 0.0])
    slope = jax.grad(lambda t: program(t)[4])(start)
    return slope[1]


def written():
    """Tag the versions, and ask for elements of them: t#0 is the first."""

    def program(t):
        t = eg.tag(t.at[1].set(2 * t[0]), "t")
        t = eg.tag(t.at[3].set(t[1] ** 2 + t[0]), "t")
        return eg.tag(t.at[4].set(t[3] * t[1]), "t")

    start = jnp.array([3.0, 0.0, 0.0, 0.0, 0.0])
    slope = eg.grad(program, start, of="t#2[4]", wrt="t#0[1]")
    return slope
