"""Calls that are refused on PyTorch."""

import numpy as np
import torch
from torch import nn

import elementgrad as eg
from tests.refusals.row import never
from tests.support.ranked import HOW
from tests.support.ranked_torch import mlp, sparse

X = torch.tensor([1.0, 2.0, 3.0])
MODEL, LOSS = mlp()
FIRST = MODEL[0].weight


def explanations():
    rows = {
        "an unknown name": (lambda: eg.explain(sum_of, X, wrt="y"), eg.PlaceError, "no tensor is named 'y'"),
        "probe": (lambda: eg.explain(sum_of, X, probe="no"), eg.OptionError, "probe='no' is neither True nor False"),
        "one live tensor": (lambda: eg.explain(of=X), eg.PlaceError, "needs both tensors"),
        "a name and a live tensor": (lambda: eg.explain(of="output", wrt=X), eg.PlaceError, "names no live tensor"),
        "out of range": (lambda: eg.explain(sum_of, X, wrt="x[7]"), eg.SelectionError, "out of range"),
        "a step without backward": (lambda: eg.explain(lambda: X.sum()), eg.PlaceError, "computed no gradient"),
        "a step and a name": (lambda: eg.explain(lambda: X.sum(), wrt="x"), eg.PlaceError, "names no live tensor"),
        "a number": (lambda: eg.explain(3, X), eg.FrameworkError, "cannot be called"),
        "a tensor": (lambda: eg.explain(X), eg.FrameworkError, "Tensor cannot be called"),
    }
    for name, row in rows.items():
        yield f"explain, {name}", row
    yield (
        "check, many entries",
        (
            lambda: eg.check(lambda x: x**2, torch.ones(64)),
            eg.OptionError,
            "64 x 64 entries are more than 1024; name some of output and of x",
        ),
    )
    for compiled in (False, True):
        yield (
            f"check, kwargs, {'compiled' if compiled else 'plain'}",
            (
                lambda compiled=compiled: eg.check(
                    torch.compile(torch.sin, backend="eager") if compiled else torch.sin, torch.ones(2), kwargs=None
                ),
                eg.OptionError,
                "kwargs=None is not a dict; give one of arguments",
            ),
        )


def sum_of(x):
    return x.sum()


def audits():
    model, frozen = nn.Linear(3, 2), nn.Linear(3, 2).requires_grad_(False)
    rows = {
        "empty model": (
            lambda: eg.audit({}, sum_of),
            eg.FrameworkError,
            "this dict has no jax.Array in it, so it holds no parameters",
        ),
        "no model": (lambda: eg.audit(3, sum_of), eg.FrameworkError, "int is no model with parameters of its own"),
        "no loss": (
            lambda: eg.audit(model, 3),
            eg.OptionError,
            "loss=3 cannot be called; give a function of the model",
        ),
        "a vector": (
            lambda: eg.audit(model, lambda model: model(X)),
            eg.OptionError,
            r"the loss has shape \(2,\) and is no single number; return its sum or its mean",
        ),
        "a number": (
            lambda: eg.audit(model, lambda model: 3.0),
            eg.FrameworkError,
            "the loss is float and no tensor of torch; return the tensor",
        ),
        "whole numbers": (
            lambda: eg.audit(model, lambda model: model(X).sum().long()),
            eg.DtypeError,
            "the loss is of dtype int64, which has no gradients",
        ),
        "no parameters": (
            lambda: eg.audit(nn.ReLU(), lambda model: model(X).sum()),
            eg.DtypeError,
            "the model has no floating-point parameter",
        ),
        "nothing that trains": (
            lambda: eg.audit(frozen, lambda model: model(X).sum()),
            eg.OptionError,
            r"none of the 2 parameters trains: weight, bias are frozen \(requires_grad=False\)",
        ),
        "a step without backward": (
            lambda: eg.audit(model, lambda: model(X).sum()),
            eg.OptionError,
            r"the step ran and asked for no gradient; call loss.backward\(\)",
        ),
        "an unknown name": (
            lambda: eg.audit(model, lambda model: model(X).sum(), except_=["wight"]),
            eg.PlaceError,
            "except_ names 'wight', and no parameter, module or custom derivative has that name; nearest: weight",
        ),
        "a scripted model": (
            lambda: eg.audit(torch.jit.script(model), sum_of),
            eg.FrameworkError,
            "a scripted model is closed; give the module that it was made of",
        ),
        "a pattern of nothing": (
            lambda: eg.audit(model, sum_of, except_="pooler.*"),
            eg.PlaceError,
            "no name matches",
        ),
        "a number for a name": (
            lambda: eg.audit(model, sum_of, [3]),
            eg.OptionError,
            "except_ has 3, which is no name",
        ),
        "everything excepted": (
            lambda: eg.audit(model, sum_of, "*"),
            eg.OptionError,
            "except_ names every parameter that trains",
        ),
    }
    for name, row in rows.items():
        yield f"audit, {name}", row


def reads():
    options = {
        'unconnected=\'none\' is neither "error" nor "zero"': {"unconnected": "none"},
        "unconnected=None is neither": {"unconnected": None},
        "budget 'plenty' is not an amount of memory": {"budget": "plenty"},
        "batch=32": {"batch": 32},
        "batch='yes'": {"batch": "yes"},
    }
    for verb in ("grad", "jacobian", "hessian"):
        for text, option in options.items():
            yield (
                f"{verb}, {option}",
                (
                    lambda verb=verb, option=option: getattr(eg, verb)(never, X, **option),
                    eg.OptionError,
                    text,
                ),
            )
    for of in (0, 3.5, b"output", torch.ones(2)):
        yield (
            f"of={of}",
            (
                lambda of=of: eg.grad(never, torch.ones(2), of=of),
                eg.PlaceError,
                r"names no tensor|of is given by name",
            ),
        )
    yield (
        "a result that fits nowhere",
        (
            lambda: eg.jacobian(lambda x: x.tanh() * x.roll(1), torch.ones(10_000_000)).dense(),
            eg.SizeError,
            r"the result would take 400 TB, and .* are free",
        ),
    )
    yield (
        "a tensor of another shape @ J",
        (
            lambda: torch.ones(2, 3, 4) @ eg.jacobian(lambda x: x * x, torch.ones(2, 3)),
            eg.BroadcastError,
            "more axes before it",
        ),
    )
    yield (
        "a sparse tensor",
        (
            lambda: eg.at(torch.tensor([1.0, 0.0]).to_sparse())[0].set(1.0),
            eg.FrameworkError,
            r"elements of layout torch.sparse_coo cannot be set; give x.to_dense\(\)",
        ),
    )
    for layout in (torch.strided,):
        calls = {
            "grad": lambda z: eg.grad(lambda z: z.unbind()[0].sum(), z, wrt="z"),
            "explain": lambda z: eg.explain(lambda z: z.unbind()[0].sum(), z, wrt="z"),
            "check": lambda z: eg.check(lambda z: z.unbind()[0].sum(), z, wrt="z"),
            "set": lambda z: eg.at(z)[0].set(1.0),
        }
        for name, call in calls.items():
            yield (
                f"{name}, nested, {layout}",
                (
                    lambda call=call, layout=layout: call(torch.nested.nested_tensor([torch.ones(2)], layout=layout)),
                    eg.FrameworkError,
                    r"elements of a nested tensor have no places; give its parts, as in x.unbind\(\)",
                ),
            )
    yield (
        "a dict of arrays beside a tensor",
        (
            lambda: eg.grad(lambda d, x: x.sum(), {"a": np.ones(2)}, X, wrt="d.a"),
            eg.PlaceError,
            "'d.a' is a NumPy array, which carries no gradients; give a tensor",
        ),
    )
    yield (
        "a recording of a sparse tensor",
        (
            lambda: eg.record(torch.eye(2).to_sparse()),
            eg.FrameworkError,
            r"have no derivatives; give x\.to_dense",
        ),
    )
    yield (
        "apply no function",
        (
            lambda: eg.at(torch.ones(2))[0].apply(3),
            eg.PlaceError,
            "apply takes a function of the named elements, and 3 is none",
        ),
    )


def module_of(tensor):
    layer = nn.Module()
    layer.w = nn.Parameter(tensor)
    return layer


def training():
    yield (
        "an expanded parameter",
        (
            lambda: eg.trainable(module_of(torch.randn(3, 1).expand(3, 4)), "w[0, 0]"),
            eg.FrameworkError,
            "expanded",
        ),
    )
    yield (
        "one number in several elements",
        (
            lambda: eg.trainable(module_of(torch.randn(5).as_strided((3, 3), (1, 1))), "w[0, 0]"),
            eg.FrameworkError,
            "one number is many elements",
        ),
    )
    yield (
        "places with values",
        (
            lambda: eg.trainable(nn.Linear(2, 2), {"bias": 1}),
            eg.PlaceError,
            "dict names no elements",
        ),
    )
    yield (
        "names for places",
        (
            lambda: eg.trainable(nn.Linear(2, 2), "bias", names={}),
            eg.OptionError,
            "these are places; leave it out",
        ),
    )
    yield (
        "variables",
        (
            lambda: eg.trainable(nn.Linear(2, 2), "bias[0]").variables,
            eg.FrameworkError,
            r"use elements\.parameters\(\)",
        ),
    )
    yield (
        "gradients",
        (
            lambda: eg.trainable(nn.Linear(2, 2), "bias[0]").gradients(None, {}),
            eg.FrameworkError,
            r"use elements\.backward\(",
        ),
    )
    for path in (3, None, b"patch.safetensors"):
        yield (
            f"apply {path!r}",
            (
                lambda path=path: eg.apply(nn.Linear(2, 2), path),
                eg.PatchError,
                "is not the path of a patch",
            ),
        )


RANKING = {
    "k is zero": ({"k": 0}, eg.OptionError, "k=0 is not a number of elements; give an int of at least 1"),
    "k is a float": ({"k": 0.1}, eg.OptionError, "k=0.1 is not a number of elements"),
    "k is a bool": ({"k": True}, eg.OptionError, "k=True is not a number of elements"),
    "k is large": ({"k": 999}, eg.OptionError, "k=999 is more than the 89 elements that there are to choose from"),
    "k is large for these": ({"k": 5, "among": "4.bias"}, eg.OptionError, "k=5 is more than the 3 elements"),
    "by": ({"by": "size"}, eg.OptionError, 'by=\'size\' is none of "gradient", "fisher", "magnitude" and "random"'),
    "by is a list": ({"by": ["fisher"]}, eg.OptionError, "is none of"),
    "loss_fn is a loss": ({"loss_fn": 3.0}, eg.OptionError, "loss_fn=3.0 cannot be called; give a function"),
    "loss_fn is left out": ({"loss_fn": None}, eg.OptionError, "loss_fn=None cannot be called"),
    "loss_fn is none for magnitude": ({"loss_fn": 3, "by": "magnitude"}, eg.OptionError, "cannot be called"),
    "since without magnitude": ({"since": {}}, eg.OptionError, 'use by="magnitude"'),
    "no model": ({"model": print}, eg.FrameworkError, "builtin_function_or_method is not a model"),
    "no floating parameter": ({"model": nn.Tanh()}, eg.DtypeError, "no floating-point parameter"),
    "among an unknown": ({"among": "0.wieght"}, eg.PlaceError, "no parameter is named '0.wieght'; nearest: 0.weight"),
    "among a layer": ({"among": "0"}, eg.PlaceError, "no parameter is named '0'; nearest: 0.weight, 0.bias"),
    "among an activation": ({"among": "0.bias (activation)"}, eg.PlaceError, "no parameter is named '0.bias'"),
    "among nothing": ({"among": []}, eg.PlaceError, "among names no parameter"),
    "among a stranger": ({"among": torch.ones(2)}, eg.PlaceError, "the tensor is not a parameter of the model"),
    "among no place": ({"among": [3]}, eg.PlaceError, "3 names no tensor"),
    "among one without a name": ({"among": eg.at[0]}, eg.PlaceError, r"name it, as in 0.weight\[0\]"),
    "among too far": ({"among": "0.bias[7]"}, eg.SelectionError, r"0.bias\[7\]: index 7 is out of range"),
    "among a write": ({"among": eg.at(MODEL[0].bias, write=0)}, eg.PlaceError, "leave write out"),
    "since is no state": ({"by": "magnitude", "since": 3}, eg.OptionError, "since=int holds no earlier parameters"),
    "since lacks one": (
        {"by": "magnitude", "since": {"0.weight": MODEL[0].weight, "0.bia": MODEL[0].bias}},
        eg.PlaceError,
        "since holds no '0.bias'; nearest: 0.bia",
    ),
    "since is another model": ({"by": "magnitude", "since": MODEL[0]}, eg.PlaceError, "since holds no '0.weight'"),
    "since has other shapes": (
        {"by": "magnitude", "since": {"0.bias": torch.ones(3)}, "among": "0.bias"},
        eg.OptionError,
        r"since holds 0.bias of shape \(3,\) and the model of shape \(7,\)",
    ),
    "since has arrays": (
        {"by": "magnitude", "since": {"0.bias": np.ones(7)}, "among": "0.bias"},
        eg.FrameworkError,
        "since holds 0.bias as ndarray",
    ),
    "since is now": (
        {"by": "magnitude", "since": MODEL.state_dict()},
        eg.OptionError,
        "no element has changed since then",
    ),
}
LOSSES = {
    "detached": (lambda model: LOSS(model).detach(), eg.UnconnectedError, "a loss has no gradient"),
    "one of them detached": (
        lambda model: [LOSS(model), torch.ones(())],
        eg.UnconnectedError,
        "a loss has no gradient",
    ),
    "a number": (lambda model: LOSS(model).sum().item(), eg.FrameworkError, "loss_fn gave float and no loss"),
    "nothing": (lambda model: None, eg.FrameworkError, "loss_fn gave NoneType and no loss"),
    "a dict": (lambda model: {"loss": LOSS(model)}, eg.FrameworkError, "loss_fn gave dict and no loss"),
    "numbers": (lambda model: [1.0], eg.FrameworkError, "loss 0 is float and no tensor of torch"),
    "an array": (lambda model: np.ones(2), eg.FrameworkError, "loss 0 is float64 and no tensor of torch"),
    "no losses": (lambda model: [], eg.OptionError, "loss_fn gave no loss at all"),
    "none one by one": (lambda model: iter(()), eg.OptionError, "loss_fn gave no loss at all"),
    "an empty vector": (lambda model: LOSS(model)[:0], eg.OptionError, r"the loss of shape \(0,\)"),
    "a matrix": (lambda model: LOSS(model)[None], eg.OptionError, r"the loss of shape \(1, 6\) is neither a number"),
    "a matrix in a list": (lambda model: [LOSS(model), LOSS(model)[None]], eg.OptionError, r"loss 1 of shape \(1, 6\)"),
    "complex": (lambda model: LOSS(model) * 1j, eg.DtypeError, "the loss is of dtype complex128"),
    "an integer": (lambda model: torch.ones((), dtype=torch.int64), eg.DtypeError, "the loss is of dtype int64"),
    "of another": (lambda model: torch.ones(1, requires_grad=True) * 2, eg.UnconnectedError, "depends on no parameter"),
    "too few reached": (
        lambda model: model[4].bias.sum() + model[2].bias.sum(),
        eg.UnconnectedError,
        "k=20 is more than the 7 elements that the loss depends on, as it does not on 0.weight, 0.bias, 2.weight, 4.w",
    ),
    "NaN": (lambda model: LOSS(model).sum() * float("nan"), eg.PlaceError, r"4.bias\[\[0\]\] has a .* of nan, which"),
    "inf": (lambda model: steep(model[0].weight[1, 2]), eg.PlaceError, r"0.weight\[\[1\], \[2\]\] has a .* of inf"),
    "taken elsewhere": (
        lambda model: LOSS(model).sum() + FIRST.sum(),
        eg.FrameworkError,
        "the loss uses 0.weight as it was taken from the model elsewhere; take it from the model that loss_fn is given",
    ),
    "swept already": (
        lambda model: swept(LOSS(model)),
        eg.FrameworkError,
        "the graph of a loss is freed, by a backward",
    ),
    "one graph for all": (lambda model: iter(LOSS(model)), eg.FrameworkError, "the graph of a loss is freed"),
}


def steep(x):
    return (x - x.detach()).sqrt()


def swept(losses):
    losses.sum().backward()
    return losses


def rank(loss_fn, by):
    try:
        eg.top(MODEL, loss_fn, 20, by)
    finally:
        assert all(p.grad is None for p in MODEL.parameters())


def write(model):
    with torch.no_grad():
        model[0].bias.clamp_(-0.1, 0.1)
    return LOSS(model)


def others(make):
    """Rank by losses that differ when they are computed again."""
    model, loss_fn = mlp()
    return eg.top(model, make(loss_fn), 5)


def ranking():
    for name, (options, error, text) in RANKING.items():
        yield (
            f"top, {name}",
            (
                lambda options=options: eg.top(**{"model": MODEL, "loss_fn": never, "k": 2, **options}),
                error,
                text,
            ),
        )
    for name, (loss_fn, error, text) in LOSSES.items():
        for by in HOW:
            yield f"top, {by}, {name}", (lambda loss_fn=loss_fn, by=by: rank(loss_fn, by), error, text)
    yield (
        "top, a loss that writes",
        (
            lambda: eg.top(mlp()[0], write, 3),
            eg.FrameworkError,
            "loss_fn has written to 0.bias in place",
        ),
    )
    again = r"returns other losses when called again|no loss at all"
    rows, batches = iter(range(20)), iter([0, 1, 2])
    yield (
        "top, losses that change",
        (
            lambda: others(lambda loss_fn: lambda model: (loss_fn(model)[0] * next(rows) for _ in range(2))),
            eg.ElementgradError,
            again,
        ),
    )
    yield (
        "top, losses that run out",
        (
            lambda: others(lambda loss_fn: lambda model: (loss_fn(model)[i] for i in batches)),
            eg.ElementgradError,
            again,
        ),
    )
    yield (
        "top, whole numbers",
        (
            lambda: eg.top(*sparse(), 1, among="steps"),
            eg.DtypeError,
            "steps is of dtype int64; choose among floating-point parameters",
        ),
    )


def watching():
    model = torch.nn.Linear(2, 2)
    rule = {"wieght[0]": lambda g: True}
    rows = {
        "no parameters": (lambda: eg.watch(torch.nn.ReLU()), eg.FrameworkError, "ReLU has no parameters"),
        "no model": (lambda: eg.watch(3), eg.FrameworkError, "int cannot be watched; give a torch.nn.Module"),
        "an unknown place": (lambda: eg.watch(model, when=rule), eg.PlaceError, "no tensor is named 'wieght'; nearest"),
        "an element that is not there": (
            lambda: eg.watch(model, when={"weight[7]": lambda g: True}),
            eg.SelectionError,
            "out of range",
        ),
        "a rule that is none": (lambda: eg.watch(model, when={"weight": 3}), eg.OptionError, "cannot be called"),
        "no rules": (lambda: eg.watch(model, when="inf"), eg.OptionError, 'is neither "nonfinite" nor a dict'),
        "no optimizer": (lambda: eg.watch(model, "adam"), eg.OptionError, "is no torch.optim.Optimizer"),
        "no folder": (lambda: eg.watch(model, capture="no/nan.capture"), eg.OptionError, "there is no directory"),
        "no loss": (lambda: eg.watch(model, loss=3), eg.OptionError, "cannot be called"),
        "no loss to call": (lambda: eg.watch(model).loss(3), eg.OptionError, "no loss was given"),
        "no capture": (lambda: eg.watch(model).replay("no.capture"), eg.OptionError, "cannot be read"),
        "a call": (lambda: eg.watch(model)(3), eg.OptionError, "is watched in a block"),
    }
    yield from ((f"watch, {name}", row) for name, row in rows.items())


ROWS = dict([*explanations(), *audits(), *reads(), *training(), *ranking(), *watching()])
