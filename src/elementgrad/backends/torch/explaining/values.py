"""Numbers for tensors: one for each that is met, and another after each write to its memory."""

import weakref

import torch

Tensor = torch.Tensor


class Values:
    """Numbers for tensors: one for each tensor that is met, and another after each write to its memory."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int, int | None]] = {}
        self._memory: dict[int, list[weakref.ref[Tensor]]] = {}
        self._count = 0

    def new(self, x: Tensor) -> int:
        """A new number for a tensor."""
        numbers, key, number = self._numbers, id(x), self._count
        self._count += 1
        known = numbers.get(key)
        if known is None or known[0]() is not x:
            memory = memory_of(x)
            ref = weakref.ref(x, lambda _: numbers.pop(key, None))
            if memory:
                living = [other for other in self._memory.get(memory, ()) if other() is not None]
                self._memory[memory] = [*living, ref]
        else:
            ref = known[0]
        numbers[key] = ref, number, version_of(x)
        return number

    def counts(self, x: Tensor) -> bool:
        """Whether a tensor has counted a write since it got its number."""
        return version_of(x) != self._numbers[id(x)][2]

    def known(self, x: Tensor) -> int | None:
        """The number of a tensor that was met."""
        found = self._numbers.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def sharing(self, x: Tensor) -> list[Tensor]:
        """The tensors met that live in the memory of one, and are alive."""
        found = [ref() for ref in self._memory.get(memory_of(x), ())]
        begin, end = _span(x)
        others = [(other, _span(other)) for other in found if other is not None and other is not x]
        return [other for other, (first, last) in others if first < end and begin < last]


def memory_of(x: Tensor) -> int:
    """Where the memory of a tensor begins; 0 if it has none."""
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a stand-in without memory
        return 0


def _span(x: Tensor) -> tuple[int, int]:
    """From where to where a tensor lies in its memory."""
    if x.layout is not torch.strided or not x.numel():
        return 0, 0
    last = sum([(size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)])
    begin = int(x.storage_offset()) * x.element_size()
    return begin, begin + (int(last) + 1) * x.element_size()


def version_of(x: Tensor) -> int | None:
    """How many writes a tensor has counted; what was made in inference mode counts none."""
    return None if x.is_inference() else x._version
