"""PyTorch's part in reads: seeds, sparse matrices and the state that worker processes start from."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import torch

from elementgrad._backends.autodiff import Linearization
from elementgrad._backends.torch import autodiff, contributions
from elementgrad._backends.torch.isolate import plainly, run_from_state
from elementgrad._cleanup import safe_context
from elementgrad._read.backend import Layout, ReadBackend
from elementgrad._read.recorder import Recorder
from elementgrad._sparsity.pattern import Pattern

Tensor = torch.Tensor


class TorchRead(ReadBackend):
    materialize = staticmethod(autodiff.materialize)
    uses = staticmethod(contributions.linearize_uses)

    def one_hot_seeds(self, like: Tensor, positions: np.ndarray, batch: int) -> Tensor:
        count = len(positions)
        seeds = torch.zeros((count, *like.shape), dtype=like.dtype, device=like.device)
        if count * batch == 1:
            seeds.view(-1)[int(positions[0])].fill_(1)
        else:
            places = torch.from_numpy(positions).to(like.device).view(count, 1, 1).expand(count, batch, 1)
            seeds.view(count, batch, -1).scatter_(2, places, 1)
        return seeds

    def transpose(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return x.permute(axes)

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        with plainly():
            return x @ y

    def free_memory(self, like: Tensor) -> int | None:
        return torch.cuda.mem_get_info(like.device)[0] if like.is_cuda else None

    def rounding(self, like: Tensor) -> str:
        return f"torch {torch.__version__}, {torch.get_num_threads()} threads" if like.device.type == "cpu" else ""

    def index(self, positions: np.ndarray, like: Tensor) -> Tensor:
        return torch.from_numpy(positions).to(like.device)

    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        return x.index_select(0, index)

    def seeds(self, values: np.ndarray, like: Tensor) -> Tensor:
        return torch.from_numpy(values).to(like.device, like.dtype)

    def sparse(self, pattern: Pattern, layout: Layout | None, like: Tensor) -> Callable[[Tensor], Tensor]:
        options: Any = {"size": pattern.shape, "check_invariants": False}
        if layout == "coo":
            places = self.index(np.stack([pattern.rows, pattern.columns]).astype(np.int64), like)
            return lambda values: torch.sparse_coo_tensor(places, values, is_coalesced=True, **options)
        starts, columns = (self.index(part.astype(np.int64), like) for part in (pattern.starts, pattern.columns))

        def by_rows(values: Tensor) -> Tensor:
            with safe_context(warnings.catch_warnings()):
                warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
                return torch.sparse_csr_tensor(starts, columns, values, **options)

        return by_rows

    def recorder(self, tensors: Sequence[Tensor]) -> Recorder:
        from elementgrad._backends.torch.record.recorder import TorchRecorder

        return TorchRecorder(tensors)

    def ambient_state(self, linear: Linearization) -> Any:
        return cast(autodiff.TorchLinearization, linear).state, torch.get_default_dtype()

    def restore_ambient_state(self, state: Any) -> AbstractContextManager[Any]:
        return run_from_state(*state)


implementation = TorchRead()
