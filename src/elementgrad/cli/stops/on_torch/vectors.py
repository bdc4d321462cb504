"""One element of a vector, on PyTorch."""


def replaced_usually():
    """Assign to it."""
    v = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    v[2] = 10.0
    return v


def replaced():
    """`set` gives a new tensor. The gradient of the old element is 0, and the
    value has its own."""
    v = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    ten, seven = torch.tensor([10.0, 7.0], requires_grad=True)

    new = eg.at(v)[2].set(ten)
    of_sum = torch.autograd.grad(new.sum(), [v, ten])

    loss = (eg.at(v)[0].set(seven) ** 2).sum()
    of_loss = torch.autograd.grad(loss, [v, seven])
    return new, of_sum, loss, of_loss


def alone_usually():
    """Multiply by a mask. A NaN somewhere else comes through all the same."""
    v = torch.tensor([1.0, 2.0, 3.0, float("nan")], requires_grad=True)
    mask = torch.tensor([0.0, 0.0, 1.0, 0.0])
    ((v * mask) ** 2).sum().backward()
    return v.grad


def alone():
    """`only` has all values of v, and the gradient of the element you name."""
    v = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    (eg.at(v)[2].only() ** 2).sum().backward()
    return v.grad


def stepped_usually():
    """Replace the element first. Then its own gradient is 0, and every other
    element moves: the wrong way round."""
    v = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    replaced = v.index_put((torch.tensor(1),), torch.tensor(2.0))
    (replaced**2).sum().backward()
    return v - 0.1 * v.grad


def stepped():
    """Keep the vector as it is and let the gradient reach element 1 alone."""
    v = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    (eg.at(v)[1].only() ** 2).sum().backward()
    return v - 0.1 * v.grad
