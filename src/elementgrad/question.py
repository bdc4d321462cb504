"""One Jacobian as a question, which can be asked again in another process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elementgrad.place import Place

if TYPE_CHECKING:
    from elementgrad.lazy import Jacobian
    from elementgrad.sparsity.pattern import Pattern


@dataclass(frozen=True, eq=False)
class Question:
    """The arguments of `jacobian`, or of `hessian`, for one output and one input."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    zero: bool
    batch: bool
    create_graph: bool
    of: Place | None
    """For a Hessian, the input of its rows."""
    wrt: Place | None
    element: Place | None = None
    """The output element that has the Hessian."""

    def ask(self, budget: int | None, pattern: "Pattern | None") -> "Jacobian":
        """Evaluate the function, here and now."""
        from elementgrad.read import hessian, jacobian  # they make Jacobians, which know their question

        options: Any = {"unconnected": "zero" if self.zero else "error", "batch": self.batch, "budget": budget}
        options |= {"kwargs": self.kwargs, "pattern": pattern}
        if self.element is None:
            return jacobian(self.function, *self.args, of=self.of, wrt=self.wrt, **options)
        if self.of == self.wrt:
            return hessian(self.function, *self.args, of=self.element, wrt=self.wrt, **options)
        options["pattern"] = None  # which is that of one of four
        return hessian(self.function, *self.args, of=self.element, wrt=[self.of, self.wrt], **options)[0][1]
