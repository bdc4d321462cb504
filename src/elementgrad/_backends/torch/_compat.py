"""Every private name of PyTorch that this backend relies on, so that an upgrade is one file."""

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.eager_transforms
import torch._functorch.vmap
from torch._C import _storage_Use_Count as _storage_Use_Count
from torch._C._dynamo.eval_frame import get_eval_frame_callback as get_eval_frame_callback
from torch._C._dynamo.guards import (
    set_is_in_mode_without_ignore_compile_internals as set_is_in_mode_without_ignore_compile_internals,
)
from torch._C._functorch import _add_batch_dim as _add_batch_dim
from torch._C._functorch import _remove_batch_dim as _remove_batch_dim
from torch._C._functorch import _vmap_decrement_nesting as _vmap_decrement_nesting
from torch._C._functorch import _vmap_increment_nesting as _vmap_increment_nesting
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped_tensor
from torch._functorch.predispatch import lazy_load_decompositions as lazy_load_decompositions
from torch.autograd.function import _SingleLevelFunction as _SingleLevelFunction
from torch.autograd.graph import _engine_run_backward as _engine_run_backward
from torch.nn.modules.module import _global_forward_hooks as _global_forward_hooks
from torch.nn.modules.module import _global_forward_hooks_always_called as _global_forward_hooks_always_called
from torch.nn.modules.module import _global_forward_pre_hooks as _global_forward_pre_hooks
from torch.nn.modules.module import _global_module_registration_hooks as _global_module_registration_hooks
from torch.optim.optimizer import _global_optimizer_post_hooks as _global_optimizer_post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves

sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""Returns how many operations autograd has counted: the order in time of graph nodes and of writes in a recording."""
saved_tensor_hooks: Any = torch._C._autograd
"""Module of the stack of default hooks for saved tensors; the public context manager cannot look at its top."""
functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Returns True inside a transform of `torch.func`, where saved tensors cannot be packed."""
FUNCTORCH_WRAPPERS: Any = (
    (torch._functorch.vmap, "_add_batch_dim"),
    (torch._functorch.eager_transforms, "_wrap_for_grad"),
)
"""The functions, by module and name, by which `torch.func` wraps its arguments; a recording patches them."""
PythonNode: Any = torch._C._FunctionBase
"""Base of the graph nodes of `autograd.Function`, which a `GradientEdge` made by hand would not keep alive."""
DisableTorchFunction: Any = torch._C.DisableTorchFunction
"""Context manager that turns off `__torch_function__`, so that ops on ids inside a dispatch mode are not seen."""


def decomposition_table() -> Any:
    """Return PyTorch's table from ops to functions that compute them by simpler ops; takes a second to import."""
    from torch._decomp import decomposition_table as table

    return table


def derivative_is_missing(error: Exception) -> bool:
    """Return True for the error about an op without a reverse or forward rule."""
    return isinstance(error, NotImplementedError) or "is not implemented" in str(error)
