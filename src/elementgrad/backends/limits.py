"""The numbers that a dtype holds."""

import math
from typing import Any, NamedTuple


class Limits(NamedTuple):
    """The range of a dtype; of complex numbers, the range of their parts.

    >>> from elementgrad.backends.limits import Limits
    >>> import numpy as np
    >>> limits = Limits.of_floats(np.finfo(np.float16))
    >>> limits.high, limits.hold(65519), limits.hold(65520)
    (65504.0, True, False)
    """

    low: Any
    high: Any
    below: Any
    """This number and all less do not fit. A float that rounds to the lowest does, so `low` itself does not tell."""
    above: Any

    @classmethod
    def of_integers(cls, info: Any) -> "Limits":
        """Return the range that an `iinfo` describes."""
        low, high = int(info.min), int(info.max)
        return cls(low, high, low - 1, high + 1)

    @classmethod
    def of_floats(cls, info: Any) -> "Limits":
        """Return the range that a `finfo` describes, whichever library it is of."""
        high = float(info.max)
        # Half a step beyond the largest number is the first that rounds to infinity. The sum is exact as an int, which
        # it has to be: of float64 it is no float.
        half = math.ldexp(float(info.eps), math.frexp(high)[1] - 2)
        above = int(high) + int(half) if half >= 1 else high + half
        return cls(-high, high, -above, above)

    def hold(self, number: Any) -> bool:
        """Return whether a finite number fits, rounded if need be."""
        return bool(self.below < number < self.above)

    def contain(self, other: "Limits") -> bool:
        """Return whether all numbers of another dtype fit, so that none has to be looked at."""
        return self.hold(other.low) and self.hold(other.high)
