"""One element of a result, on JAX."""


def itself_usually():
    """Ask for the gradient of all."""
    X = jnp.arange(1.0, 10.0).reshape(3, 3)
    slope = jax.grad(lambda X: X)(X)
    return slope


def itself():
    """Name the element."""
    X = jnp.arange(1.0, 10.0).reshape(3, 3)
    one = eg.grad(lambda X: X, X, of="output[1, 2]")
    total = eg.grad(lambda X: X.sum(), X)
    return one, total


def product_usually():
    """Compute the whole Jacobian and throw most of it away: 16 numbers for
    these two, and 10^12 for matrices of 1000 x 1000."""
    X = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    Y = jnp.array([[5.0, 6.0], [7.0, 8.0]])
    whole = jax.jacobian(jnp.matmul)(X, Y)
    return whole.size, whole[0, 0]


def product():
    """A Jacobian that you index, and nothing else is computed."""
    X = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    Y = jnp.array([[5.0, 6.0], [7.0, 8.0]])
    J = eg.jacobian(lambda X, Y: X @ Y, X, Y, wrt="X")
    return J[(0, 0), :], J[(0, 0), (0, 1)]


def pixel_usually():
    """Cut the model open: write the first half again, to get at its inside. It
    is right for as long as nobody changes the model."""

    def half(image):
        tanh1 = jnp.tanh(jax.lax.conv(image, params["conv1"], (1, 1), "VALID"))
        return jax.lax.conv(tanh1, params["conv2"], (1, 1), "VALID")[0, 5, 1, 2]

    slope = jax.grad(half)(image)
    return slope[0, 0, 3, 4]


def pixel():
    """Name both: what the model tagged has a name. The whole receptive field
    costs the same one sweep."""
    field = eg.grad(
        net, params, image, of="conv2[0, 5, 1, 2]", wrt="image[0, 0]"
    )
    number = eg.grad(
        net, params, image, of="conv2[0, 5, 1, 2]", wrt="image[0, 0, 3, 4]"
    )
    return number, field


def score():
    """Any tensor of the model has a name, and so has each of its elements."""
    places = {
        "pixels": "image[0, 0]",
        "maps": "tanh1",
        "weight": "params.conv1[4, 0, 1, 1]",
    }
    slopes = eg.grad(net, params, image, of="output[0, 3]", wrt=places)
    return slopes["pixels"], slopes["maps"].shape, slopes["weight"]


def words():
    """The embedding of each word is tagged, and so it has a name."""
    sentence = ["a", "brave", "cat", "sees", "the"]
    tokens = jnp.array([[1, 43, 2, 18, 0]])
    asked = {"of": "output[0, -1, 2]", "wrt": "embedded"}
    of_words = eg.grad(reader, words, tokens, **asked)
    sizes = jnp.linalg.norm(of_words, axis=-1)
    return sizes


def large():
    """A plan says what a read would cost, before anything is paid."""
    J = eg.jacobian(net, params, image, of="conv2", wrt="image")
    f = lambda x: jnp.tanh(x) * jnp.roll(x, 1)
    big = eg.jacobian(f, jnp.ones(100_000))
    return J.shape, big.plan(..., 7), big[6:10, 7]


def second():
    """A Hessian is indexed like a Jacobian."""
    x = jnp.array([2.0, 3.0])
    H = eg.hessian(lambda x: x[0] * x[1] ** 2 + x.sum() ** 2, x)
    return H[0, 1]
