"""User code on all frameworks: reads of a Jacobian, and functions that raise at a given call."""

import numpy as np

import elementgrad as eg

JACOBIAN_READS = {
    "row": lambda J: J[(0, 0), :],
    "rows": lambda J: J[(0, ...), :],
    "column": lambda J: J[:, (0, 0)],
    "columns": lambda J: J[:, (0, ...)],
    "entries": lambda J: J.entries(([0, 1], [0, 1]), ([0, 1], [0, 1])),
    "diagonal": lambda J: J.diagonal(),
    "product": lambda J: J @ np.ones((2, 3)),
    "products": lambda J: J @ np.ones((2, 3, 2)),
    "row product": lambda J: np.ones((2, 3)) @ J,
    "whole": lambda J: J.dense(),
}
"""Every way to read a Jacobian of 2 x 3 numbers by 2 x 3 numbers."""


class Failing:
    """Code of a user's that comes by `reach` in its forward, between two losses, and on the way back."""

    def __init__(self):
        self.failure = None, None

    def __deepcopy__(self, memo):
        return self

    def fail(self, when, kind):
        """Raise an error of this kind from now on, when `when` is reached."""
        self.failure = when, kind("mine")
        return self.failure[1]

    def recover(self):
        self.failure = None, None

    def reach(self, when):
        if self.failure[0] == when:
            raise self.failure[1]


def at_once(read):
    """Return a verb that does everything in its last step."""
    return lambda user: lambda: read(user.model, user.x)


def of_jacobian(read):
    """Return a verb that makes a Jacobian first, and reads it in its last step."""

    def make(user):
        J = eg.jacobian(user.model, user.x)
        return lambda: read(J)

    return make
