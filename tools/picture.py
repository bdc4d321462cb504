"""Draws docs/assets/verbs.svg, the picture of the README: `python tools/picture.py`. Every number in it is computed.

A place and what the verbs do with it, in six panels. It follows the reader's light or dark scheme by itself.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path

import torch
from torch import nn

import elementgrad as eg

FILE = Path(__file__).parent.parent / "docs" / "assets" / "verbs.svg"
WIDTH, HEIGHT = 300, 270
STYLE = """
  .page { fill: #ffffff; } .panel { fill: #f5f6f8; } .ink { fill: #1f2430; } .soft { fill: #5a6272; }
  .cell { fill: #dfe3ea; stroke: #f5f6f8; } .line { stroke: #5a6272; } .pick { fill: #e07b00; } .low { fill: #2f6fb5; }
  .bad { stroke: #c4322b; } .on { fill: #ffffff; }
  text { font-family: system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif; font-size: 15px; }
  .code { font-family: ui-monospace, "SFMono-Regular", "Liberation Mono", monospace; font-size: 14px; }
  .verb { font-size: 20px; font-weight: 600; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #1b1d23; } .panel { fill: #262a33; } .ink { fill: #eceef2; } .soft { fill: #a8b0bf; }
    .cell { fill: #3d4350; stroke: #262a33; } .line { stroke: #a8b0bf; } .pick { fill: #f29a2e; }
    .low { fill: #5a9be0; } .bad { stroke: #ff6b61; } .on { fill: #1b1d23; }
  }
"""


def text(x: float, y: float, words: object, kind: str = "ink", anchor: str = "middle") -> str:
    """A line of text."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{escape(str(words))}</text>'


def call(*lines: str) -> Iterator[str]:
    """The call that a panel is about, at its foot."""
    for number, line in enumerate(lines):
        yield text(150, (244 if len(lines) == 1 else 234) + 18 * number, line, "code soft")


def cell(x: float, y: float, size: float, kind: str = "cell", strength: float = 1.0) -> str:
    """One element of a tensor; fainter where its number is smaller."""
    base = f'<rect x="{x:g}" y="{y:g}" width="{size:g}" height="{size:g}" class="cell"/>'
    if kind == "cell" or not strength:
        return base
    over = f'<rect x="{x + 1:g}" y="{y + 1:g}" width="{size - 2:g}" height="{size - 2:g}" class="{kind}"'
    return base + over + (f' fill-opacity="{strength:.2f}"/>' if strength < 1 else "/>")


def grid(x: float, y: float, size: float, values: torch.Tensor) -> Iterator[str]:
    """A matrix as cells: above zero orange, below it blue."""
    largest = values.abs().max().item() or 1.0
    for i, row in enumerate(values.tolist()):
        for j, value in enumerate(row):
            kind = "pick" if value > 0 else "low" if value < 0 else "cell"
            yield cell(x + j * size, y + i * size, size, kind, abs(value) / largest)


def numbers(x: float, y: float, size: float, values: torch.Tensor, picked: int) -> Iterator[str]:
    """A vector with its numbers, one of them marked."""
    for j, value in enumerate(values.tolist()):
        yield cell(x + j * size, y, size, "pick" if j == picked else "cell")
        yield text(x + (j + 0.5) * size, y + size / 2 + 5, f"{value:g}", "on" if j == picked else "ink")


def place() -> Iterator[str]:
    """One element of a tensor."""
    chosen = torch.zeros(6, 6)
    chosen[2, 3] = 1
    yield from grid(78, 66, 24, chosen)
    yield from call("eg.at(x)[2, 3]")


def edit() -> Iterator[str]:
    """Replace one element, and differentiate the sum."""
    v = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    new = eg.at(v)[2].set(10.0)
    (slope,) = torch.autograd.grad(new.sum(), v)
    yield text(70, 88, "x", "soft", "end")
    yield from numbers(84, 66, 36, v.detach(), -1)
    yield text(70, 138, "new", "soft", "end")
    yield from numbers(84, 116, 36, new.detach(), 2)
    yield text(70, 188, "grad", "soft", "end")
    yield from numbers(84, 166, 36, slope, -1)
    yield from call("eg.at(x)[2].set(10)")


def read() -> Iterator[str]:
    """The receptive field of one element of a feature map, over the image."""
    torch.manual_seed(3)
    layers = {"conv1": nn.Conv2d(1, 4, 3), "tanh": nn.Tanh(), "conv2": nn.Conv2d(4, 2, 3)}
    net = nn.Sequential(OrderedDict(layers)).double()
    image = torch.rand(1, 1, 8, 8, dtype=torch.float64)
    yield from grid(78, 66, 18, eg.grad(net, image, of="conv2[0, 1, 1, 2]", wrt="input[0, 0]"))
    yield from call("eg.grad(net, image,", 'of="conv2[0, 1, 1, 2]")')


def train() -> Iterator[str]:
    """What moves in one step of AdamW: with a mask on the gradient, and here."""

    def moved(masked: bool) -> torch.Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(6, 6)
        before = layer.weight.detach().clone()
        elements = None if masked else eg.trainable(layer, "weight[2, 3]")
        optimizer = torch.optim.AdamW([layer.weight] if elements is None else elements.parameters(), lr=0.1)
        layer(torch.ones(1, 6)).square().sum().backward()
        if masked:
            layer.weight.grad *= torch.zeros(6, 6).index_put((torch.tensor(2), torch.tensor(3)), torch.tensor(1.0))
        optimizer.step()
        return (layer.weight.detach() != before).float()

    for x, label, values in ((38, "mask", moved(True)), (166, "here", moved(False))):
        yield from grid(x, 84, 16, values)
        yield text(x + 48, 72, label, "soft")
        yield text(x + 48, 202, f"{int(values.sum())} of {values.numel()} move")
    yield from call("eg.trainable(model,", '"weight[2, 3]")')


def explain() -> Iterator[str]:
    """The path of a gradient, and the step at which it ends."""
    x = torch.tensor([1.0, -2.0, 3.0])
    diagnosis = eg.explain(lambda x: torch.relu(torch.tanh(x * 0.5)).sum(), x, wrt="x[1]")
    for i, step in enumerate(("x[1]", *diagnosis.path)):
        y, broken = 66 + i * 29, "(broken here)" in step
        yield f'<rect x="46" y="{y}" width="76" height="22" rx="5" class="{"pick" if not i or broken else "cell"}"/>'
        yield text(84, y + 16, step.split()[0], "on" if not i or broken else "ink")
        if i:
            cut = 'class="bad" stroke-dasharray="3 3"' if broken else 'class="line"'
            yield f'<path d="M84 {y - 7}v7" stroke-width="2" fill="none" {cut}/>'
        if broken:
            yield text(136, y + 9, f"{diagnosis.verdict}:", "ink", "start")
            yield text(136, y + 27, diagnosis.cause, "ink", "start")
    yield from call('eg.explain(f, x, wrt="x[1]")')


def split() -> Iterator[str]:
    """A derivative as the sum over the uses of an element."""
    shares = eg.contributions(lambda x: 2 * x[2] + x.sum(), torch.tensor([1.0, 2.0, 3.0, 4.0]), wrt="x[2]")
    bars = [(share.operation, share.value.item()) for share in shares] + [("total", shares.total.item())]
    done = 0.0
    for i, (name, value) in enumerate(bars):
        start = 0.0 if name == "total" else done
        y, x, width = 78 + i * 46, 96 + start * 50, value * 50
        yield text(84, y + 19, name, "soft", "end")
        kind = "pick" if name == "total" else "low"
        yield f'<rect x="{x:g}" y="{y}" width="{width:g}" height="28" rx="3" class="{kind}"/>'
        yield text(x + width / 2, y + 19, f"{value:g}", "on")
        done = start + value
    yield from call("eg.contributions(f, x,", 'wrt="x[2]")')


PANELS: dict[str, Callable[[], Iterator[str]]] = {
    "a place": place,
    "edit": edit,
    "read": read,
    "train": train,
    "explain": explain,
    "show": split,
}


def picture() -> str:
    """All panels, in two rows of three."""
    parts = []
    for number, (verb, drawn) in enumerate(PANELS.items()):
        x, y = number % 3 * WIDTH, number // 3 * HEIGHT
        inside = "\n".join(drawn())
        box = f'<rect x="6" y="6" width="{WIDTH - 12}" height="{HEIGHT - 12}" rx="10" class="panel"/>'
        parts.append(
            f'<g transform="translate({x} {y})">\n{box}\n{text(22, 40, verb, "ink verb", "start")}\n{inside}\n</g>'
        )
    size = f'viewBox="0 0 {3 * WIDTH} {2 * HEIGHT}" width="{3 * WIDTH}" height="{2 * HEIGHT}"'
    title = "<title>A place, and edit, read, train, explain and show, each on one element</title>"
    page = '<rect width="100%" height="100%" class="page"/>'
    body = "\n".join([title, f"<style>{STYLE}</style>", page, *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n{body}\n</svg>\n'


if __name__ == "__main__":
    FILE.write_text(picture())
