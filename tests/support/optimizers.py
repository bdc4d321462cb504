"""Every optimizer of PyTorch with options that matter, and what masking the gradient leaks under each of them.

`python -m tests.support.optimizers` writes the table of `docs/training-leaks.md` anew.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

PAGE = Path(__file__).parents[2] / "docs" / "training-leaks.md"
START, END = "<!-- the table -->\n", "<!-- its end -->\n"
Options = dict[str, Any]

# What is asked of each: by name, the options in which it may move what it should not.
OPTIONS: dict[str, list[Options]] = {
    "SGD": [
        {},
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
    "Adam": [{}, {"weight_decay": 0.1}, {"amsgrad": True}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "AdamW": [{}, {"weight_decay": 0.0}, {"amsgrad": True, "weight_decay": 0.1}],
    "Adamax": [{}, {"weight_decay": 0.1}],
    "NAdam": [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RMSprop": [{}, {"momentum": 0.9}, {"weight_decay": 0.1}, {"centered": True, "momentum": 0.9}],
    "Rprop": [{}],
    "ASGD": [{}, {"weight_decay": 0.1}, {"t0": 10, "lambd": 0.01}],
    "Adagrad": [{}, {"weight_decay": 0.1}],
    "Adadelta": [{}, {"weight_decay": 0.1}],
    "Adafactor": [{}, {"weight_decay": 0.1}],
    "LBFGS": [{}, {"line_search_fn": "strong_wolfe"}],
}
FROZEN = 1019
"""How many elements `leaked` has that are not to move."""
MUON: dict[str, list[Options]] = {"Muon": [{}, {"weight_decay": 0.0}]} if hasattr(torch.optim, "Muon") else {}
"""PyTorch 2.8 does not have it yet."""
REFUSING = {"SparseAdam", *MUON}
"""Those that take no dense vector."""
FOREACH = {name for name in OPTIONS if name != "LBFGS"}
FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
"""Those that have a fused step on the CPU."""
USUAL: dict[str, Options] = {
    "SGD": {"lr": 0.001},
    "ASGD": {"lr": 0.002},
    "Adadelta": {"lr": 1.0},
    "LBFGS": {"lr": 0.3, "max_iter": 2},
}


def cases() -> list[tuple[str, Options]]:
    """Optimizers and options: all of the table, and each again as PyTorch may compute it."""
    found = [(name, options) for name, some in OPTIONS.items() for options in some]
    for name in OPTIONS:
        last = OPTIONS[name][-1]
        if name in FOREACH:
            found += [(name, last | {way: True}) for way in ("foreach", "maximize")]  # without foreach is usual here
        if name in FUSED:
            found.append((name, last | {"fused": True}))
    return found


def written(name: str, options: Options) -> str:
    """An optimizer as a person writes it."""
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})"


def made(name: str, parameters: Any, options: Options) -> torch.optim.Optimizer:
    """An optimizer of that name, with a learning rate at which all of them move visibly."""
    return getattr(torch.optim, name)(parameters, **{"lr": 0.01} | USUAL.get(name, {}) | options)


def leaked(name: str, options: Options, before: int) -> int:
    """Count the frozen elements that ten steps with a masked gradient change, after some steps without a mask."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 10), nn.Linear(10, 2, bias=False))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    masks = [torch.zeros_like(parameter) for parameter in model.parameters()]
    masks[0][0, 5] = 1
    optimizer = made(name, model.parameters(), options)
    tokens = torch.arange(100)
    masked = False

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(tokens) - 1).square().sum()
        loss.backward()
        if masked:
            for parameter, mask in zip(model.parameters(), masks, strict=True):
                parameter.grad *= mask
        return loss

    for _ in range(before):
        optimizer.step(closure)
    masked = True
    held = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(10):
        optimizer.step(closure)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    changed = [parameter != value for parameter, value in zip(model.parameters(), held, strict=True)]
    return int(sum((some & (mask == 0)).sum() for some, mask in zip(changed, masks, strict=True)))


def table() -> str:
    """The table of the page, in Markdown."""
    every = OPTIONS | {"LBFGS": [{}]} | MUON
    rows = [(name, options) for name, some in every.items() for options in some]
    say = {0: "none", FROZEN: f"all {FROZEN}"}
    lines = ["| optimizer | masked from the start | masked after five steps |", "|---|---|---|"]
    for name, options in rows:
        counts = [leaked(name, options, before) for before in (0, 5)]
        lines.append(f"| `{written(name, options)}` | {' | '.join(say.get(count, 'some') for count in counts)} |")
    return "\n".join(lines) + "\n"


def parted(page: str) -> tuple[str, str, str]:
    """Return the page before its table, the table, and the rest."""
    before, _, rest = page.partition(START)
    held, _, after = rest.partition(END)
    return before + START, held, END + after


if __name__ == "__main__":
    before, _, after = parted(PAGE.read_text())
    PAGE.write_text(before + table() + after)
