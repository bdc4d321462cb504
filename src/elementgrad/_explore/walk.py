"""`Walker`: the way back from an element, from layer to layer along its strongest drivers."""

from typing import Any

import numpy as np

import elementgrad as eg
from elementgrad._explore.messages import Edits, Element
from elementgrad._explore.tensors import Tensors, has_slopes
from elementgrad._explore.views import rank
from elementgrad.errors import PlaceError

STEPS_AT_ONCE = 6
"""Layers before a target that are looked at first."""
Step = tuple[Element, Any, list[Element]]
"""A driver, its gradient, and the elements that were stepped over on the way to it."""


class Walker:
    """Finds the strongest drivers of elements in the layers before them."""

    def __init__(self, tensors: Tensors):
        self._tensors = tensors
        self._last: tuple[tuple[Element, Edits], Step] | None = None

    def forget(self) -> None:
        """Drop the step that was read last."""
        self._last = None

    def step_back(self, of: Element, edits: Edits) -> Step:
        """Return the strongest driver of an element in the nearest layer before it, its gradient, and what is passed.

        Before the first layer are the inputs, or where no input has gradients, as with tokens, the parameters.
        """
        if self._last is not None and self._last[0] == (of, edits):
            return self._last[1]  # it was read for the source of the step before
        passed: list[Element] = []
        candidates, count = self._candidates_before(of.tensor), STEPS_AT_ONCE
        while candidates:
            # What is near is read at the cost of a few layers; if none of it will do, the rest takes few reads.
            group, candidates, count = candidates[:count], candidates[count:], 8 * count
            places = [self._tensors.place(tensor) for tensor in group]
            slopes = self._tensors.call(eg.grad, edits, of=self._tensors.place(of), wrt=places, unconnected="zero")
            gradients = {tensor: self._tensors.to_numpy(each) for tensor, each in zip(group, slopes, strict=True)}
            driving = [tensor for tensor in group if gradients[tensor].any()]
            self._tensors.load_values(driving, edits)
            for tensor in driving:
                gradient = gradients[tensor]
                best = rank(gradient, self._tensors.values(tensor, edits), 1)[0]
                driver, slope = Element(tensor, best), gradient[best]
                # One number that goes through unchanged is no step; x + 1 has a gradient of 1 as well, and is one.
                values = [self._tensors.element_value(element, edits) for element in (driver, of)]
                is_same = slope == 1 and np.count_nonzero(gradient) == 1 and values[0] == values[1]
                if not is_same or self._tensors.row(tensor).kind != "activation":
                    self._last = (of, edits), (driver, slope, passed)
                    return driver, slope, passed
                passed.append(driver)
        raise PlaceError(f"nothing before {self._tensors.text(of)} has a gradient that is not zero")

    def _candidates_before(self, tensor: int) -> list[int]:
        """Return the tensors that a walk may step back to, the nearest first."""
        row = self._tensors.row(tensor)
        if row.kind not in ("output", "activation"):
            raise PlaceError(f"{row.name} is of kind {row.kind}, and nothing comes before it")
        floating = [(other, each.kind) for other, each in enumerate(self._tensors.names) if has_slopes(each)]
        layers, inputs, parameters = [
            [other for other, kind in floating if kind == wanted] for wanted in ("activation", "input", "parameter")
        ]
        before = [other for other in layers if row.kind == "output" or other < tensor]
        data = [other for other in inputs if other in self._tensors.data]
        data.sort(key=lambda other: other != self._tensors.default_source)
        return [*before[::-1], *(data or inputs or parameters)]

    def source_before(self, of: Element, edits: Edits) -> int:
        """Return the tensor by which an element is to be shown: the layer before it, if there is one."""
        if self._tensors.row(of.tensor).kind not in ("output", "activation"):
            return of.tensor
        try:
            return self.step_back(of, edits)[0].tensor
        except PlaceError:
            return self._tensors.default_source
