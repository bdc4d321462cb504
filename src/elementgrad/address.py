"""`at`: how places are made, of a live tensor, of a name or of whatever tensor a verb is about."""

from typing import Any

from elementgrad import backends, text
from elementgrad.backends import Backend
from elementgrad.errors import PlaceError, quoted
from elementgrad.index import normalize
from elementgrad.place import Place

Tensor = Any


class At:
    """`eg.at`: names elements. Call it with a tensor or a name, or index it for whatever tensor a verb is about.

    >>> import torch, elementgrad as eg
    >>> x = torch.arange(6.0).reshape(2, 3)
    >>> eg.at(x)[1, 2].get()
    tensor(5.)
    >>> print(eg.at("conv1")[0, 12], eg.at("conv1[0, 12]"), eg.at[0, 5])
    conv1[0, 12] conv1[0, 12] [0, 5]
    """

    __slots__ = ()

    def __call__(self, target: Tensor | str | Place, *, kind: str | None = None, write: int | None = None) -> Place:
        """The place of a tensor, of a name or of a place's text; all of its elements, until you index it.

        In a recording, `write` chooses the k-th write of each element, from the end if negative.

        >>> import torch, elementgrad as eg
        >>> t = torch.tensor([3.0, 0.0])
        >>> with eg.record(t) as rec:
        ...     t[0] = t[0] * 2
        ...     t[1] = t[0] ** 2
        ...     t[0] = t[0] * 5
        ...     y = t[0] + t[1]
        >>> rec.grad(y, eg.at(t, write=0)[0]), rec.grad(y, eg.at(t)[0])
        (tensor(17.), tensor(1.))
        """
        if kind is not None and kind not in text.KINDS:
            raise PlaceError(f"kind {quoted(kind)} is none of {', '.join(text.KINDS)}")
        backend = backends.owner(target)
        if write is not None:
            _require_write(write, backend)
        if backend is not None and kind is None:
            return Place(target, None, (), None, backend, write=write)
        if isinstance(target, str):
            target = Place.parse(target)
        if not isinstance(target, Place):
            backends.find(target)
            raise PlaceError(
                f"kind {quoted(kind)} tells two tensors of one name apart and this one was given itself; leave it out"
            )
        if kind not in (None, target.kind) and target.kind is not None:
            raise PlaceError(f"{target} is a place of kind {target.kind!r} and not {quoted(kind)}; give one kind")
        kind = kind or target.kind
        return Place(
            target.tensor, target.name, target.index, kind, target._backend, target.pointwise, write=target.write
        )

    def __getitem__(self, index: Any) -> Place:
        return Place(None, None, normalize(index))

    __iter__ = None

    def __repr__(self) -> str:
        return "elementgrad.at"


def _require_write(write: Any, backend: Backend | None) -> None:
    if isinstance(write, bool) or not isinstance(write, int):
        raise PlaceError(f"write={write!r} is not an int; give 0 for the first write of an element, -1 for the last")
    if backend is None:
        raise PlaceError(f"write={write} is about a live tensor in a recording; give the tensor itself, as in eg.at(t)")


at = At()
