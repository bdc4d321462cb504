"""The stops of the tour on PyTorch."""

from collections.abc import Callable
from typing import Any

import elementgrad as eg

torch: Any = None  # imported when the tour starts
SHADES = "·░▒▓█"


def replace_an_element() -> dict[str, Any]:
    """Replace element 2 by a value and differentiate the sum."""
    v = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    value = torch.tensor(10.0, requires_grad=True)
    new = eg.at(v)[2].set(value)
    new.sum().backward()
    return {"new": new, "v.grad": v.grad, "value.grad": value.grad}


def replace_and_square() -> dict[str, Any]:
    """Replace element 0 by a value and differentiate the sum of squares."""
    v = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    value = torch.tensor(7.0, requires_grad=True)
    loss = (eg.at(v)[0].set(value) ** 2).sum()
    loss.backward()
    return {"loss": loss, "v.grad": v.grad, "value.grad": value.grad}


def one_element_alone() -> dict[str, Any]:
    """Get the gradient of one element alone, all others zero."""
    v = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    (eg.at(v)[2].only() ** 2).sum().backward()
    return {"v.grad": v.grad}


def one_step_on_one_element() -> dict[str, Any]:
    """Take one gradient step (learning rate 0.1) on element 1 and move nothing else."""
    v = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    (eg.at(v)[1].only() ** 2).sum().backward()
    return {"v - 0.1 * v.grad": v - 0.1 * v.grad}


def the_published_answer() -> dict[str, Any]:
    """Beware the usual answer: replace the element first, and every *other* element moves."""
    v = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    (eg.at(v)[1].set(2.0) ** 2).sum().backward()
    return {"v - 0.1 * v.grad": v - 0.1 * v.grad}


def three_ways_to_element_zero() -> dict[str, Any]:
    """Read element 0 by index, by gather and by mask: indexing is differentiable, and all agree."""
    x = torch.tensor([3.0, 4.0, 5.0], requires_grad=True)

    def gradient(index: Any) -> Any:
        return torch.autograd.grad((eg.at(x)[index].get() ** 2).sum(), x)[0]

    return {
        "gradient(0)": gradient(0),
        "gradient([0])": gradient([0]),
        "gradient(x < 4)": gradient(x < 4),
    }


def element_zero_alone() -> dict[str, Any]:
    """Enable gradients for element 0 alone."""
    x = torch.tensor([3.0, 4.0, 5.0], requires_grad=True)
    (eg.at(x)[0].only() ** 2).sum().backward()
    return {"x.grad": x.grad}


def the_message_about_element_zero() -> dict[str, Any]:
    """What does "element 0 of tensors does not require grad" mean? Element 0 is your *loss*; `eg.explain` tells why."""
    model = torch.nn.Linear(3, 1)

    def step() -> None:
        scores = model(torch.ones(2, 3)).detach()
        scores.sum().backward()

    try:
        step()
    except RuntimeError as error:
        message = str(error)
    told = eg.explain(step)
    return {"message": message, "told.cause": told.cause, "told.fix": told.fix}


def a_learned_choice() -> dict[str, Any]:
    """Learn which element to choose: the mask is itself a parameter."""
    x, logits = torch.tensor([3.0, 1.0, 2.0]), torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=1.0)
    for _ in range(200):
        optimizer.zero_grad()
        (eg.choose(x, logits) - 1.0).square().backward()
        optimizer.step()
    weights, chosen = logits.softmax(0), eg.choose(x, logits, hard=True)
    return {"weights": weights, "chosen": chosen}


def element_of_a_product() -> dict[str, Any]:
    """Differentiate one element of a matrix product: no tape, no watching, no requires_grad."""
    X, Y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    J = eg.jacobian(torch.matmul, X, Y, wrt=X)
    return {"J[(0, 0), :]": J[(0, 0), :], "J[(0, 0), (0, 1)]": J[(0, 0), (0, 1)]}


def element_of_itself() -> dict[str, Any]:
    """Differentiate X[1, 2] and the sum of X with respect to X."""
    X = torch.arange(1.0, 10.0).reshape(3, 3)
    one = eg.grad(lambda X: X, X, of="output[1, 2]")
    total = eg.grad(lambda X: X.sum(), X)
    return {"one": one, "total": total}


def feature_to_pixel() -> dict[str, Any]:
    """How does one feature-map element in the middle of a network depend on one pixel? What is its receptive field?"""
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(1, 4, 3), torch.nn.Tanh(), torch.nn.Conv2d(4, 2, 3), torch.nn.Flatten()
    net, image = torch.nn.Sequential(*layers, torch.nn.Linear(32, 5)), torch.rand(1, 1, 8, 8)
    number = eg.grad(net, image, of="2[0, 1, 2, 0]", wrt="input[0, 0, 4, 2]")
    field = eg.grad(net, image, of="2[0, 1, 2, 0]", wrt="input[0, 0]")
    return {"number": number, "picture(field)": picture(field)}


def logit_to_neuron() -> dict[str, Any]:
    """How does one logit depend on one neuron inside, and on one weight?"""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    both = eg.grad(net, torch.ones(4), of="output[1]", wrt={"neuron": "1[2]", "weight": "0.weight[2, 0]"})
    return {'both["neuron"]': both["neuron"], 'both["weight"]': both["weight"]}


def used_twice() -> dict[str, Any]:
    """Differentiate y = 2 x[2] + sum(x) with respect to x[2]: 2 directly and 1 through the sum."""
    x = torch.tensor([1.0, 2.0, 3.0])
    shares = eg.contributions(lambda x: 2 * x[2] + x.sum(), x, wrt="x[2]")
    values = torch.stack([share.value for share in shares])
    return {"values": values, "shares.total": shares.total}


def inside_one_tensor() -> dict[str, Any]:
    """Differentiate an element with respect to another of the same tensor, through in-place writes."""
    t = torch.tensor([3.0, 0.0, 0.0, 0.0, 0.0])
    with eg.record(t) as rec:
        t[1] = 2 * t[0]
        t[3] = t[1] ** 2 + t[0]
        t[4] = t[3] * t[1]
    slope = rec.grad(eg.at(t)[4], eg.at(t)[1])
    return {"slope": slope}


def function_with_an_index() -> dict[str, Any]:
    """The same through a Function of your own that takes an index: the index is no tensor to save for backward."""

    class Weighted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, i: int) -> Any:
            ctx.shape, ctx.i = x.shape, i
            return 3 * x[i] + x.sum()

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g * (torch.ones(ctx.shape) + 3 * torch.eye(*ctx.shape)[ctx.i]), None

    x = torch.tensor([1.0, 2.0, 3.0])
    slope = eg.grad(lambda x: Weighted.apply(x, 2), x, wrt="x[2]")
    return {"slope": slope}


def asked_twice() -> dict[str, Any]:
    """Vectorised operations hide nothing, and asking twice gives the same number, not twice the number."""
    x, w = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    J = eg.jacobian(lambda x: (x * w).sum(), x)
    first, again = J[..., 2], J[..., 2]
    return {"first": first, "again": again}


def a_few_entries_of_many() -> dict[str, Any]:
    """Read a column of a Jacobian that would take 40 GB: see what it costs before you pay."""
    J = eg.jacobian(lambda x: x.tanh() * x.roll(1), torch.ones(100_000))
    return {"str(J.plan(..., 7))": str(J.plan(..., 7)), "J[6:10, 7]": J[6:10, 7]}


def one_second_derivative() -> dict[str, Any]:
    """One entry of a Hessian, without the others."""
    H = eg.hessian(lambda x: x[0] * x[1] ** 2 + x.sum() ** 2, torch.tensor([2.0, 3.0]))
    return {"H[0, 1]": H[0, 1], "H.diagonal()": H.diagonal()}


def bad_numbers_stay_away() -> dict[str, Any]:
    """A NaN in an untouched element poisons `mask * x`, but no edit of ours."""
    x = torch.tensor([float("nan"), 2.0], requires_grad=True)
    mask = torch.tensor([0.0, 1.0])
    masked = (mask * x).sum()
    (eg.at(x)[0].set(0.0) ** 2).sum().backward()
    return {"masked": masked, "x.grad": x.grad}


def train_one_entry() -> dict[str, Any]:
    """Train one entry of a 100 x 10 embedding, under AdamW with weight decay: nothing else moves by a bit."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(100, 10), torch.nn.Linear(10, 2))
    table, head = model[0].weight.clone(), model[1].weight.clone()
    elements = eg.trainable(model, "0.weight[0, 5]")
    optimizer = torch.optim.AdamW(elements.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.arange(100)).square().sum().backward()
        optimizer.step()
    moved = (model[0].weight != table).nonzero()
    return {"moved": moved, "(model[1].weight != head).sum()": (model[1].weight != head).sum()}


def the_usual_mask() -> dict[str, Any]:
    """Beware the usual answer, a mask on the gradient: decay and earlier momentum move the other 999 as well."""
    mask = eg.at(torch.zeros(100, 10))[0, 5].set(1.0)

    def leaked(kind: Any, begin: int, **options: Any) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(100, 10), torch.nn.Linear(10, 2))
        optimizer = kind(model[0].parameters(), lr=0.1, **options)
        for step in range(5):
            optimizer.zero_grad()
            model(torch.arange(100)).square().sum().backward()
            if step == begin:
                before = model[0].weight.detach().clone()
            if step >= begin:
                model[0].weight.grad *= mask
            optimizer.step()
        return (model[0].weight != before)[mask == 0].sum()

    adamw = leaked(torch.optim.AdamW, begin=0)
    momentum = leaked(torch.optim.SGD, begin=1, momentum=0.9)
    return {"adamw": adamw, "momentum": momentum}


def an_entry_of_a_sequence_model() -> dict[str, Any]:
    """Train entry [0, 12] of a GRU model's embedding for one output token; unseen, its gradient is 0 and not None."""
    torch.manual_seed(0)
    embedding, gru, head = torch.nn.Embedding(50, 32), torch.nn.GRU(32, 64), torch.nn.Linear(64, 50)
    model = torch.nn.ModuleDict({"embedding": embedding, "gru": gru, "head": head})
    elements = eg.trainable(model, "embedding.weight[0, 12]")

    def gradient(*tokens: int) -> Any:
        elements["embedding.weight[0, 12]"].grad = None
        scores = head(gru(embedding(torch.tensor(tokens)))[0])[-1]
        (-scores.log_softmax(0)[2]).backward()
        return elements["embedding.weight[0, 12]"].grad

    return {"gradient(7, 0, 3)": gradient(7, 0, 3), "gradient(7, 4, 3)": gradient(7, 4, 3)}


def why_is_it_zero() -> dict[str, Any]:
    """Why is the gradient of that entry zero? `eg.explain` says that token 0 does not occur in the input."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 32), torch.nn.GRU(32, 64))
    told = eg.explain(model, torch.tensor([7, 4, 3]), of="output.0[-1, 2]", wrt="0.weight[0, 12]")
    return {"told.verdict": told.verdict, "told.cause": told.cause, "told.sentence": told.sentence}


def each_entry_its_loss() -> dict[str, Any]:
    """Two entries, each with its own target token: neither hears the loss of the other, as it would of their sum."""
    torch.manual_seed(0)
    embedding, gru, head = torch.nn.Embedding(50, 32), torch.nn.GRU(32, 64), torch.nn.Linear(64, 50)
    model = torch.nn.ModuleDict({"embedding": embedding, "gru": gru, "head": head})
    elements = eg.trainable(model, ["embedding.weight[0, 12]", "embedding.weight[1, 25]"])
    losses = -head(gru(embedding(torch.tensor([7, 0, 1])))[0])[-1].log_softmax(0)
    summed = torch.cat(torch.autograd.grad(losses[2] + losses[5], list(elements.parameters()), retain_graph=True))
    elements.backward({"embedding.weight[0, 12]": losses[2], "embedding.weight[1, 25]": losses[5]})
    routed = torch.cat([values.grad for values in elements.parameters()])
    return {"routed": routed, "summed": summed}


def picture(field: Any) -> str:
    """Numbers as shades, two characters each: the larger, the darker."""
    shades = torch.ceil(4 * field.abs() / field.abs().max()).int().tolist()
    return "\n  ".join("".join(SHADES[shade] * 2 for shade in row) for row in shades)


STOPS: tuple[Callable[[], dict[str, Any]], ...] = (
    replace_an_element,
    replace_and_square,
    one_element_alone,
    one_step_on_one_element,
    the_published_answer,
    three_ways_to_element_zero,
    element_zero_alone,
    the_message_about_element_zero,
    a_learned_choice,
    element_of_a_product,
    element_of_itself,
    feature_to_pixel,
    logit_to_neuron,
    used_twice,
    inside_one_tensor,
    function_with_an_index,
    asked_twice,
    a_few_entries_of_many,
    one_second_derivative,
    bad_numbers_stay_away,
    train_one_entry,
    the_usual_mask,
    an_entry_of_a_sequence_model,
    why_is_it_zero,
    each_entry_its_loss,
)
