"""Gradients that are not there, on PyTorch."""


def message_usually():
    """Widespread advice: `loss.requires_grad_()`. The message goes away, and
    nothing learns."""
    features = net.tanh2(net.conv2(net.tanh1(net.conv1(image)))).detach()
    loss = (features**2).mean()
    try:
        loss.backward()
    except RuntimeError as error:
        message = str(error)
    loss.requires_grad_()
    loss.backward()
    learning = sum(p.grad is not None for p in net.parameters())
    return message, learning


def message():
    """The message is not about your x[0]: "element 0 of tensors" is the first
    tensor that you called backward on, the loss. `eg.explain` names the line
    that cut it off."""

    def step():
        features = net.conv2(net.tanh1(net.conv1(image)))
        features = net.tanh2(features).detach()
        loss = (features**2).mean()
        loss.backward()

    told = eg.explain(step)
    return told.sentence, told.where, told.fix


def three_ways():
    """By index, by gather and by mask: the same gradient."""
    x = torch.tensor([3.0, 4.0, 5.0], requires_grad=True)
    (by_index,) = torch.autograd.grad(x[0] ** 2, x)
    gathered = x.gather(0, torch.tensor([0]))
    (by_gather,) = torch.autograd.grad((gathered**2).sum(), x)
    (by_mask,) = torch.autograd.grad((x[x < 4] ** 2).sum(), x)
    (by_place,) = torch.autograd.grad(eg.at(x)[0].get() ** 2, x)
    return by_index, by_gather, by_mask, by_place


def element_zero_usually():
    """Let the element require it. But `x[0]` is a new tensor each time."""
    x = torch.tensor([3.0, 4.0, 5.0])
    x[0].requires_grad_()
    (x[0] ** 2).backward()
    return x.grad


def element_zero():
    """The tensor requires it, and `only` lets it reach the element."""
    x = torch.tensor([3.0, 4.0, 5.0], requires_grad=True)
    (eg.at(x)[0].only() ** 2).sum().backward()
    return x.grad


def choice_usually():
    """Take the element with the largest logit: nothing comes back from
    `argmax`."""
    x, logits = (
        torch.tensor([3.0, 1.0, 2.0]),
        torch.zeros(3, requires_grad=True),
    )
    chosen = x[logits.argmax()]
    ((chosen - 1.0) ** 2).backward()
    return logits.grad


def choice():
    """`choose` learns which element comes nearest to 1."""
    x, logits = (
        torch.tensor([3.0, 1.0, 2.0]),
        torch.zeros(3, requires_grad=True),
    )
    optimizer = torch.optim.SGD([logits], lr=1.0)
    for _ in range(200):
        optimizer.zero_grad()
        ((eg.choose(x, logits) - 1.0) ** 2).backward()
        optimizer.step()
    weights, chosen = logits.softmax(0), eg.choose(x, logits, hard=True)
    return weights, chosen
