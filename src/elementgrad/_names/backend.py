"""The interface that a backend implements for names: `NamesBackend`, and the `Model` that it returns."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from elementgrad._names.capture import Capture

Tensor = Any
Node = tuple[Sequence[Any], Sequence[Any], Callable[[Sequence[Any]], Any]]
"""One level of a container: the keys of its contents (None for the only content of a box, which has the name of the
box), the contents, and a function that rebuilds the container around other contents."""


GIVEN = ".input"
"""Behind the path of a module: what the module is given, as opposed to what it returns."""


class Replacement(NamedTuple):
    """A tensor that a function holds, and the one that it computes with in its place."""

    name: str
    held: Tensor
    new: Tensor


class Model:
    """A function of the user, with the modules whose tensors and layers have names in its calls.

    `roots` has each module under the prefix of its names: the argument that it is given as, or an empty prefix for the
    function itself. A plain function has none.
    """

    def __init__(self, function: Callable[..., Any], roots: Mapping[str, Any] | None = None):
        self.function = function
        root = self.root_of(function) if roots is None else None
        self.roots: Mapping[str, Any] = roots or ({} if root is None else {"": root})

    @staticmethod
    def root_of(value: Any) -> Any:
        """Return the module that a value is, or is a method of, if its tensors and layers have names; or None."""
        return None

    only_input: str | None = None
    """A name that the only input always has."""

    def named_tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield name, kind ("parameter" or "buffer") and tensor of all that the function holds."""
        return iter(())

    def layers(self) -> Iterator[str]:
        """Yield the names of all layers."""
        return iter(())

    def modules(self) -> Iterator[tuple[str, Any]]:
        """Yield name and object of all that the model is made of, itself by an empty name."""
        return iter(())

    def input_aliases(self) -> Mapping[str, Sequence[str]]:
        """Return the model's own names of its inputs, each with what that input may be called as an argument."""
        return {}

    def aliases(self) -> Mapping[str, str]:
        """Return other spellings of names of tensors and layers, each with the name."""
        return {}

    def canonical_name(self, name: str) -> str:
        """Return the name under which a tensor is found, for a name that may be another spelling of it."""
        return name

    def structure(self) -> Hashable:
        """Return what decides which layers a call computes, beside its arguments; None if that is not known."""
        return None

    def may_stop(self) -> bool:
        """Return True if the code that is running now can be left by an exception, with nothing left undone."""
        return False

    def lookup(self, name: str) -> list[tuple[str, Tensor | None]]:
        """Return kind and tensor of everything with a name; the result of a layer is an activation without a tensor."""
        return []

    @contextmanager
    def prepare(self, replacements: Sequence[Replacement], capture: "Capture | None") -> Iterator[Callable[..., Any]]:
        """Yield the function to call, with some of its tensors replaced and its named values captured."""
        if capture is None:
            yield self.function
        else:
            with capture.open():
                yield self.function


def split_prefix(prefix: str, name: str) -> str | None:
    """Return the rest of a name behind the prefix of a root, empty for the root itself; None without that prefix."""
    if not prefix or name == prefix:
        return name[len(prefix) :]
    return name[len(prefix) + 1 :] if name.startswith(f"{prefix}.") else None


def add_prefix(prefix: str, name: str) -> str:
    """Return a name inside of a root, with the prefix of the root."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


class NamesBackend:
    """The framework's part in finding tensors by name. The defaults are those of plain functions and eager tensors."""

    model: type[Model] = Model
    """The type of a function together with the names that it holds."""
    takes_arrays = False
    """True if functions of the framework take NumPy arrays for tensors."""
    mixes_arrays = True
    """True if they take a container of both, arrays and tensors."""
    extra_keywords: tuple[str, ...] = ()
    """The arguments by name that any model may be called with, whether its forward takes them or not."""
    closure_limit = ""
    """Why derivatives by what a function closes over cannot be read, as the end of a clause; empty if they can."""
    model_hint = "; for the names of a model that the function closes over, give names_from=, the model"
    """The end of a sentence about an unknown name in a function that is no model and is given none."""

    def is_model(self, function: Any) -> bool:
        """Return True if a function holds tensors or layers that have names."""
        return False

    def name_closed_over(self, x: Tensor) -> str | None:
        """Return a name for a parameter that is neither an argument nor in a root, if runs can replace it; or None."""
        return None

    def forward_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function whose signature a call of a model has."""
        return function

    def traceable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the user's function in the form to call here, where code may be rewritten (AutoGraph) or copied."""
        return function

    def flatten_node(self, value: Any) -> Node | None:
        """Return one level of a container of the framework's own, or None for anything else."""
        return None

    def is_shared_object(self, value: Any) -> bool:
        """Return True for a container that is one object wherever a tree has it, as modules of flax NNX are."""
        return False

    def from_numpy(self, array: Any, model: Model) -> Tensor | None:
        """Return the tensor that the framework would make of an array given to a function; None if it makes none."""
        return None

    def unwrap_parameter(self, x: Tensor) -> Tensor:
        """Return the tensor that a model computes with, for the object that users see as its parameter."""
        return x

    def snapshot(self, x: Tensor) -> Tensor:
        """Return a captured tensor as it is now, whatever is written to it later, with the same derivatives."""
        return x

    def is_real_call(self, x: Tensor) -> bool:
        """Return True if a named value is computed here, and not traced only for its shape."""
        return True

    def is_single_value(self, x: Tensor) -> bool:
        """Return True if a named value is one value, and not one for each iteration of a loop in a graph."""
        return True

    def name_in_graph(self, x: Tensor, name: str) -> Tensor:
        """Return a traced tensor with a name that stays in the traced program; any other tensor as it is."""
        return x
