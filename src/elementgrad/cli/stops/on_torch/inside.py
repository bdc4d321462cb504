"""An element that makes another of the same tensor, on PyTorch."""


def twice_usually():
    """Call backward, look, and call it again. Vectorised operations hide
    nothing (it is w[2], 6), but `.grad` adds up."""
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    w = torch.tensor([4.0, 5.0, 6.0])
    (x * w).sum().backward()
    first = x.grad[2].clone()
    (x * w).sum().backward()
    again = x.grad[2]
    return first, again


def twice():
    """A question changes nothing, so that asking again gives the same."""
    x, w = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    first = eg.grad(lambda x: (x * w).sum(), x, wrt="x[2]")
    again = eg.grad(lambda x: (x * w).sum(), x, wrt="x[2]")
    return first, again


def uses():
    """One share for each use of the element; they add up to the derivative."""
    x = torch.tensor([1.0, 2.0, 3.0])
    shares = eg.contributions(lambda x: 2 * x[2] + x.sum(), x, wrt="x[2]")
    direct, through_sum = (share.value for share in shares)
    return direct, through_sum, shares.total


def own_rule_usually():
    """A published Function hands the index to `save_for_backward`."""

    class Weighted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, i):
            ctx.save_for_backward(x, i)
            return 3 * x[i] + x.sum()

        @staticmethod
        def backward(ctx, g):
            x, i = ctx.saved_tensors
            slope = torch.ones_like(x)
            slope[i] += 3
            return g * slope, None

    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    Weighted.apply(x, 2).backward()
    return x.grad[2]


def own_rule():
    """An index is no tensor: it goes on the context. `eg.check` holds the rule
    against differences."""

    class Weighted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, i):
            ctx.save_for_backward(x)
            ctx.i = i
            return 3 * x[i] + x.sum()

        @staticmethod
        def backward(ctx, g):
            slope = torch.ones_like(ctx.saved_tensors[0])
            slope[ctx.i] += 3
            return g * slope, None

    x = torch.tensor([1.0, 2.0, 3.0])
    slope = eg.grad(lambda x: Weighted.apply(x, 2), x, wrt="x[2]")
    verdict = eg.check(lambda x: Weighted.apply(x, 2), x).verdict
    return slope, verdict


def written_usually():
    """Ask PyTorch for the gradient of one by the other."""
    t = torch.tensor([3.0, 0, 0, 0, 0], requires_grad=True).clone()
    t[1] = 2 * t[0]
    t[3] = t[1] ** 2 + t[0]
    t[4] = t[3] * t[1]
    (slope,) = torch.autograd.grad(t[4], t[1])
    return slope


def written():
    """Record the tensor before it is written to, and ask for elements of it."""
    t = torch.tensor([3.0, 0, 0, 0, 0])
    with eg.record(t) as rec:
        t[1] = 2 * t[0]
        t[3] = t[1] ** 2 + t[0]
        t[4] = t[3] * t[1]
    slope = rec.grad(eg.at(t)[4], eg.at(t)[1])
    return slope
