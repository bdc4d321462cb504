"""All of a Jacobian: at once, block by block, on workers, or straight to disk."""

from typing import TYPE_CHECKING, Any, cast

from elementgrad.backends import plain

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from os import PathLike

    from elementgrad.distributed.blocks import Blocks
    from elementgrad.lazy import Jacobian

Tensor = Any


class Whole:
    """The part of a Jacobian that is about all of it."""

    @plain
    def dense(self, executor: "Executor | None" = None, out: "str | PathLike[str] | None" = None) -> Any:
        """The whole Jacobian, of shape `J.shape`.

        With an `executor` of concurrent.futures (a `ProcessPoolExecutor` that spawns, Dask's `client.get_executor()`,
        mpi4py's `MPIPoolExecutor`) its blocks are read by workers. With `out`, a path, it is written to a Zarr array
        there block by block, which is what comes back. A call with the same `out` goes on where an earlier one
        ended.

        >>> import torch, elementgrad as eg
        >>> eg.jacobian(lambda x: x * x.sum(), torch.ones(2)).dense()
        tensor([[3., 1.],
                [1., 3.]])
        """
        if executor is None and out is None:
            return cast("Jacobian", self)[..., ...]
        if out is not None:
            from elementgrad.distributed.store import checked

            checked(out)
        blocks = self.blocks(executor)
        return blocks.gathered() if out is None else blocks.stored(out)

    @plain
    def blocks(self, executor: "Executor | None" = None) -> "Blocks":
        """The whole Jacobian as blocks of rows or columns, to be iterated over: NumPy arrays with where they belong.

        Each is read when it is its turn, and none is kept, so that a Jacobian larger than the memory can be passed
        through. With an `executor` workers read them, and they come as they are done.

        >>> import torch, elementgrad as eg
        >>> J = eg.jacobian(lambda x: x**2, torch.tensor([1.0, 2.0, 3.0]))
        >>> float(max(abs(block.values).max() for block in J.blocks()))
        6.0
        """
        from elementgrad.distributed.blocks import Blocks

        return Blocks(cast("Jacobian", self), executor)
