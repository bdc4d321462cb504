"""Training single elements, on PyTorch."""


def entry_usually():
    """Multiply the gradient by a mask. Weight decay and earlier momentum do not
    ask the gradient: they move the other 999 entries as well."""
    mask = torch.zeros(100, 10)
    mask[0, 5] = 1

    def leaked(kind, masked_from=0, **options):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Embedding(100, 10), torch.nn.Linear(10, 2)
        )
        table = model[0].weight
        optimizer = kind(model.parameters(), lr=0.1, **options)
        for step in range(5):
            if step == masked_from:
                before = table.detach().clone()
            optimizer.zero_grad()
            model(torch.arange(100)).square().sum().backward()
            if step >= masked_from:
                table.grad *= mask
            optimizer.step()
        return int((table != before)[mask == 0].sum())

    sgd = leaked(torch.optim.SGD)
    momentum = leaked(torch.optim.SGD, masked_from=1, momentum=0.9)
    adam = leaked(torch.optim.Adam, masked_from=1)
    adamw = leaked(torch.optim.AdamW)
    return sgd, momentum, adam, adamw


def entry():
    """The optimizer is given the one entry and nothing else that it could move:
    not by a bit, whichever optimizer it is."""

    def moved(kind, **options):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Embedding(100, 10), torch.nn.Linear(10, 2)
        )
        before = {name: p.clone() for name, p in model.state_dict().items()}
        elements = eg.trainable(model, "0.weight[0, 5]")
        optimizer = kind(elements.parameters(), lr=0.1, **options)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.arange(100)).square().sum().backward()
            optimizer.step()
        after = model.state_dict()
        return [
            f"{name}{where}"
            for name, old in before.items()
            for where in (after[name] != old).nonzero().tolist()
        ]

    sgd = moved(torch.optim.SGD)
    momentum = moved(torch.optim.SGD, momentum=0.9, weight_decay=0.1)
    adam = moved(torch.optim.Adam)
    adamw = moved(torch.optim.AdamW, weight_decay=0.1)
    return sgd, momentum, adam, adamw


def token_usually():
    """Give the optimizer the entry."""
    entry = reader.embedding.weight[0, 12]
    optimizer = torch.optim.Adam([entry], lr=0.1)
    return optimizer


def token():
    """Of all that the model has learned, number 12 of "the" alone goes on
    learning: "cat" is to come next."""
    elements = eg.trainable(reader, "embedding.weight[0, 12]")
    optimizer = torch.optim.Adam(elements.parameters(), lr=0.1)
    steps, chances = [], []
    for _ in range(12):
        optimizer.zero_grad()
        loss = losses(1, 43, 2, 18, 0)[2]  # a brave cat sees the ... cat
        loss.backward()
        optimizer.step()
        steps.append(
            {place: elements[place].detach().clone() for place in elements}
        )
        chances.append(loss.neg().exp().item())
    elements.release(keep=False)
    return chances[0], chances[-1]


def unseen():
    """Its word does not occur. The gradient is 0 and not None, and `eg.explain`
    says so."""
    tokens = torch.tensor([[1, 43, 2, 18, 1]])  # a brave cat sees a
    told = eg.explain(
        reader, tokens, of="output[0, -1, 2]", wrt="embedding.weight[0, 12]"
    )
    return told.value, told.sentence, told.fix


def routed_usually():
    """Add the losses up. Each entry hears both. (The same answer scores ten
    targets against one row, and raises.)"""
    heard = losses(1, 43, 2, 18, 0)
    (slope,) = torch.autograd.grad(heard[2] + heard[5], reader.embedding.weight)
    the, a = slope[0, 12], slope[1, 25]
    try:
        scores = reader(torch.tensor([[1, 43, 2, 18, 0]]))[:, -1]
        torch.nn.functional.cross_entropy(scores, torch.arange(10))
    except ValueError as error:
        ten_targets = str(error)
    return the, a, ten_targets


def routed():
    """Each place is given its own loss: "the" hears of "cat", and "a" of
    "fish"."""
    places = "embedding.weight[0, 12]", "embedding.weight[1, 25]"
    elements = eg.trainable(reader, places)
    heard = losses(1, 43, 2, 18, 0)
    elements.backward({places[0]: heard[2], places[1]: heard[5]})
    the, a = (elements[place].grad for place in places)
    elements.release()
    return the, a


def shipped():
    """Teach the net a digit that it misreads, by one row of the head. A patch
    is as large as what was trained, and is taken back to the bit."""
    wrong = 1500 + int((net(x[1500:]).argmax(1) != y[1500:]).nonzero()[0])
    digit, truth = x[wrong : wrong + 1], y[wrong : wrong + 1]
    weights = [p.clone() for p in net.parameters()]
    read_as = net(digit).argmax()

    elements = eg.trainable(net, f"head.weight[{truth.item()}, :]")
    optimizer = torch.optim.AdamW(elements.parameters(), lr=0.01)
    while net(digit).argmax() != truth:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(digit), truth).backward()
        optimizer.step()
    elements.save(folder / "digit.safetensors")
    elements.release(keep=False)
    undone = all(map(torch.equal, net.parameters(), weights))

    patch = eg.inspect(folder / "digit.safetensors")
    applied = eg.apply(net, folder / "digit.safetensors")
    now_read_as = net(digit).argmax()
    right_now = (net(x[1500:]).argmax(1) == y[1500:]).float().mean()
    applied.undo()
    return truth[0], read_as, now_read_as, right_now, patch.size, undone
