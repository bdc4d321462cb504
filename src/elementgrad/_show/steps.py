"""Pictures of numbers in an order: shares that add up, values over steps, and values before and after.

Every `draw_` function returns a picture, notes on what it leaves out, and a description.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from elementgrad._read.contributions import Shares
from elementgrad._show.style import SMALL, Picture, Theme, add_legend, set_integer_ticks
from elementgrad._show.values import require_elements, to_floats
from elementgrad._train.entries import element_text
from elementgrad._train.patch import Patch
from elementgrad.errors import OptionError, SelectionError

MAX_ROWS = 20
"""Shares, or elements before and after, that are drawn."""
MAX_LINES = 10
"""Elements of a trace that are drawn."""
DASHES = ("-", "--", ":")


def draw_waterfall(shares: Shares, theme: Theme) -> tuple[Picture, list[str], str]:
    """Draw each share as a bar from the sum of those before it, and their total."""
    values = [to_floats(share.value) for share in shares]
    if any(value.size != 1 for value in values):
        raise SelectionError(
            f"shares of shape {values[0].shape} are many waterfalls; name one element of both sides, as in "
            'eg.contributions(f, x, of="output[0]", wrt="x[2]")'
        )
    numbers = np.array([value.item() for value in values])
    labels = ["  ".join(filter(None, (share.operation, share.where))) for share in shares]
    numbers, labels, notes = _merge_smallest(numbers, labels)
    total = float(sum(value.item() for value in values)) if values else 0.0
    finite = np.where(np.isfinite(numbers), numbers, 0.0)
    ends = np.cumsum(finite)
    starts = ends - finite
    picture = Picture(theme, 6.8, 0.3 * (len(numbers) + 1) + 1.0)
    axes = picture.add_panel()
    rows = np.arange(len(numbers))
    colours = [theme.above if number >= 0 else theme.below for number in finite]
    axes.barh(rows, finite, 0.62, left=starts, color=colours, gid="shares")
    last = total if np.isfinite(total) else 0.0
    axes.barh([len(numbers)], [last], 0.62, color=theme.faint, gid="total")
    for row, end in zip(rows, ends, strict=True):
        axes.plot([end, end], [row - 0.31, row + 1.31], color=theme.faint, linewidth=0.8)
    axes.axvline(0.0, color=theme.faint, linewidth=0.8)
    lowest, highest = min(0.0, ends.min(initial=0.0), last), max(0.0, ends.max(initial=0.0), last)
    room = (highest - lowest) or 1.0
    axes.set_xlim(lowest - 0.16 * room, highest + 0.16 * room)
    sides = [*np.maximum(starts, ends), max(last, 0.0)]
    texts = [*[f"{number:+.4g}" for number in numbers], f"{total:.4g}"]
    for line, (side, text) in enumerate(zip(sides, texts, strict=True)):
        axes.text(float(side) + 0.012 * room, line, text, va="center", **picture.text_style(size=SMALL))
    axes.set_ylim(len(numbers) + 0.6, -0.6)
    axes.set_yticks([*rows, len(rows)], [*labels, "total"], parse_math=False)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter("{x:.3g}")
    picture.label_axes(axes, "derivative")
    description = ", ".join([f"{label} {number:+.4g}" for label, number in zip(labels, numbers, strict=True)])
    return picture, notes, f"Waterfall of {len(shares)} shares: {description}; total {total:.4g}"


def _merge_smallest(numbers: np.ndarray, labels: list[str]) -> tuple[np.ndarray, list[str], list[str]]:
    """Keep the largest of many shares, in order, and add up the rest."""
    if len(numbers) <= MAX_ROWS:
        return numbers, labels, []
    sizes = np.where(np.isfinite(numbers), np.abs(numbers), np.inf)
    largest = np.sort(np.argsort(-sizes, kind="stable")[: MAX_ROWS - 1])
    rest = len(numbers) - len(largest)
    others = numbers.sum() - numbers[largest].sum() if np.isfinite(numbers).all() else np.delete(numbers, largest).sum()
    note = f"the {rest} smallest of {len(numbers)} shares are drawn as one"
    return np.append(numbers[largest], others), [*[labels[index] for index in largest], f"{rest} others"], [note]


def is_trace(what: Any) -> bool:
    """Return True for a list of values by place, one for each step."""
    return isinstance(what, (list, tuple)) and bool(what) and all(isinstance(each, Mapping) for each in what)


def draw_trace(steps: Sequence[Mapping[Any, Any]], theme: Theme) -> tuple[Picture, list[str], str]:
    """Draw the values of each element over the steps."""
    places = list(steps[0])
    if any(list(step) != places for step in steps) or not places:
        raise OptionError("the steps of a trace have different places; give the same places, in order, at each step")
    values_of: dict[str, np.ndarray] = {}
    for place in places:
        rows = [to_floats(step[place]).reshape(-1) for step in steps]
        if len({len(row) for row in rows}) != 1:
            raise OptionError(f"{place} has not the same number of values at each step; give as many each time")
        for index, values in enumerate(np.stack(rows, axis=-1)):
            values_of[f"{place}" if len(rows[0]) == 1 else f"{place} ({index})"] = values
    chosen = sorted(values_of, key=lambda name: -_distance(values_of[name]))[:MAX_LINES]
    picture = Picture(theme, 6.8, 3.4)
    axes = picture.add_panel()
    styles = itertools.product(DASHES, theme.lines)
    for name, (dash, colour) in zip([name for name in values_of if name in chosen], styles, strict=False):
        dots = "o" if len(steps) <= 25 else ""
        axes.plot(values_of[name], dash, color=colour, linewidth=1.6, marker=dots, markersize=3, label=_shorten(name))
    set_integer_ticks(axes.xaxis)
    axes.yaxis.set_major_formatter("{x:.4g}")
    picture.label_axes(axes, "step", "value")
    add_legend(picture, axes.get_lines(), loc="outside right upper", ncols=1)
    notes = []
    if len(chosen) < len(values_of):
        notes.append(f"{len(chosen)} of {len(values_of)} elements: those that moved furthest")
    broken = [name for name in chosen if not np.isfinite(values_of[name]).all()]
    if broken:
        notes.append(f"not finite at some step: {', '.join(map(_shorten, broken))}")
    description = ", ".join([f"{name} from {values_of[name][0]:.4g} to {values_of[name][-1]:.4g}" for name in chosen])
    return picture, notes, f"Values over {len(steps)} steps: {description}"


def draw_changes(patch: Patch, theme: Theme) -> tuple[Picture, list[str], str]:
    """Draw each element before and after, those that moved furthest if there are many."""
    names, before, after = elements_of_patch(patch)
    require_elements(before.shape)
    with np.errstate(invalid="ignore"):
        distance = np.abs(after - before)
    order = np.argsort(-np.where(np.isfinite(distance), distance, np.inf), kind="stable")[:MAX_ROWS]
    order = np.sort(order)
    picture = Picture(theme, 6.8, 0.27 * len(order) + 1.2)
    axes = picture.add_panel()
    for row, index in enumerate(order):
        colour = theme.above if after[index] >= before[index] else theme.below
        axes.plot(
            [before[index], after[index]], [row, row], color=colour, linewidth=2.2, gid="change", solid_capstyle="butt"
        )
    rows = np.arange(len(order))
    hollow: dict[str, Any] = {"markerfacecolor": theme.paper, "markeredgecolor": theme.ink, "markersize": 5.5}
    old = axes.plot(before[order], rows, "o", label="before", gid="before", zorder=3, **hollow)
    new = axes.plot(after[order], rows, "o", color=theme.ink, markersize=5.5, label="after", gid="after", zorder=3)
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.set_yticks(rows, [_shorten(names[index]) for index in order], parse_math=False)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter("{x:.4g}")
    picture.label_axes(axes, "value")
    add_legend(picture, [*old, *new])
    left = len(names) - len(order)
    notes = [f"{len(order)} of {len(names)} elements: those that moved furthest"] if left else []
    description = ", ".join([f"{names[index]} from {before[index]:.4g} to {after[index]:.4g}" for index in order])
    return picture, notes, f"Elements before and after: {description}"


def elements_of_patch(patch: Patch) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the names of all elements of a patch, their originals, and their values."""
    names, before, after = [], [np.zeros(0)], [np.zeros(0)]
    for entry in patch.entries:
        names += [element_text(entry.name, entry.shape, position) for position in entry.indices]
        before.append(to_floats(entry.require_originals("a picture of it").floats()))
        after.append(to_floats(entry.values.floats()))
    return names, np.concatenate(before), np.concatenate(after)


def _distance(values: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):
        distance = float(np.max(values) - np.min(values))
    return distance if np.isfinite(distance) else np.inf


def _shorten(name: str) -> str:
    return name if len(name) <= 34 else f"{name[:14]}…{name[-19:]}"
