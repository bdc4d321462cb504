"""One element of a result, on PyTorch."""


def itself_usually():
    """Call backward on an element of a tensor that nobody told to require a
    gradient."""
    X = torch.arange(1.0, 10.0).reshape(3, 3)
    X[1, 2].backward()
    return X.grad


def itself():
    """Name the element. A plain tensor will do."""
    X = torch.arange(1.0, 10.0).reshape(3, 3)
    one = eg.grad(lambda X: X, X, of="output[1, 2]")
    total = eg.grad(lambda X: X.sum(), X)
    return one, total


def product_usually():
    """Compute the whole Jacobian and throw most of it away: 16 numbers for
    these two, and 10^12 for matrices of 1000 x 1000."""
    X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    Y = torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    whole = torch.func.jacrev(torch.matmul)(X, Y)
    return whole.numel(), whole[0, 0]


def product():
    """A Jacobian that you index, and nothing else is computed."""
    X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    Y = torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    J = eg.jacobian(torch.matmul, X, Y, wrt=X)
    return J[(0, 0), :], J[(0, 0), (0, 1)]


def pixel_usually():
    """Catch the feature map in a hook and call backward. The number is right,
    and now every parameter before it has a gradient that the next training step
    will add to its own."""
    seen = {}
    hook = net.conv2.register_forward_hook(
        lambda module, args, result: seen.update(conv2=result)
    )
    x = image.clone().requires_grad_()
    net(x)
    seen["conv2"][0, 5, 1, 2].backward()
    left_behind = [
        name for name, p in net.named_parameters() if p.grad is not None
    ]
    hook.remove()
    net.zero_grad()
    return x.grad[0, 0, 3, 4], left_behind


def pixel():
    """Name both. No hook, and no gradient is left anywhere. The whole receptive
    field costs the same one sweep."""
    field = eg.grad(net, image, of="conv2[0, 5, 1, 2]", wrt="input[0, 0]")
    number = eg.grad(
        net, image, of="conv2[0, 5, 1, 2]", wrt="input[0, 0, 3, 4]"
    )
    untouched = all(p.grad is None for p in net.parameters())
    return number, field, untouched


def score():
    """Any tensor of the model has a name, and so has each of its elements."""
    places = {
        "pixels": "input[0, 0]",
        "maps": "tanh1",
        "weight": "conv1.weight[4, 0, 1, 1]",
    }
    slopes = eg.grad(net, image, of="output[0, 3]", wrt=places)
    return slopes["pixels"], slopes["maps"].shape, slopes["weight"]


def words():
    """The embedding of each word is an activation like any other."""
    sentence = ["a", "brave", "cat", "sees", "the"]
    tokens = torch.tensor([[1, 43, 2, 18, 0]])
    of_words = eg.grad(reader, tokens, of="output[0, -1, 2]", wrt="embedding")
    sizes = of_words.norm(dim=-1)
    return sizes


def large():
    """A plan says what a read would cost, before anything is paid."""
    J = eg.jacobian(net, image, of="conv2", wrt="input")
    big = eg.jacobian(lambda x: x.tanh() * x.roll(1), torch.ones(100_000))
    return J.shape, big.plan(..., 7), big[6:10, 7]


def second():
    """A Hessian is indexed like a Jacobian."""
    x = torch.tensor([2.0, 3.0])
    H = eg.hessian(lambda x: x[0] * x[1] ** 2 + x.sum() ** 2, x)
    return H[0, 1]
