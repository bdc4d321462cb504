"""Every private name of PyTorch that this backend relies on, so that an upgrade is one file."""

# ruff: noqa: I001 (grouped by what they are for)
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from types import CodeType
from typing import Any

import torch

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8):  # recordings look at the top of the hooks for saving
    raise ImportError("elementgrad needs PyTorch 2.8 or newer")

import torch._functorch.eager_transforms
import torch._functorch.vmap
import torch.utils._device
import torch.utils._python_dispatch
from torch.autograd import forward_ad

from elementgrad._cleanup import defer, safe_context, scope

# The compiler. Its own modules are not imported here: that takes as long as importing PyTorch.
from torch._guards import TracingContext
from torch._C._dynamo.eval_frame import get_eval_frame_callback as get_eval_frame_callback

# vmap without its wrappers, to run one sweep for a stack of seeds: `torch.func.vmap` takes longer than a small sweep.
from torch._C._functorch import _add_batch_dim as _add_batch_dim
from torch._C._functorch import _remove_batch_dim as _remove_batch_dim
from torch._C._functorch import _vmap_decrement_nesting as _vmap_decrement_nesting
from torch._C._functorch import _vmap_increment_nesting as _vmap_increment_nesting
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped_tensor

try:  # before 2.9 with vmap itself
    from torch._functorch.predispatch import lazy_load_decompositions as lazy_load_decompositions
except ImportError:
    from torch._functorch.vmap import lazy_load_decompositions as lazy_load_decompositions  # type: ignore

# Sweeps through a graph: the engine without the checks of `torch.autograd.grad`, and who else uses a memory.
from torch._C import _storage_Use_Count as _storage_Use_Count
from torch.autograd.function import FunctionMeta as FunctionMeta
from torch.autograd.function import _SingleLevelFunction as _SingleLevelFunction
from torch.autograd.graph import _engine_run_backward as _engine_run_backward

# The tables of global hooks: an entry of its own is put in and taken out without a handle, which an interrupt could
# lose, and in a tenth of the time.
from torch.nn.modules.module import _global_forward_hooks as _global_forward_hooks
from torch.nn.modules.module import _global_forward_hooks_always_called as _global_forward_hooks_always_called
from torch.nn.modules.module import _global_forward_pre_hooks as _global_forward_pre_hooks
from torch.nn.modules.module import _global_module_registration_hooks as _global_module_registration_hooks
from torch.optim.optimizer import _global_optimizer_post_hooks as _global_optimizer_post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as _global_optimizer_pre_hooks

# Modes that see every operation, and the pytrees that operations take. Documented, but in private modules.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_unflatten as tree_unflatten

# The modes and switches of a thread, one by one and in C, so that no interrupt leaves some of them changed.
from torch._C import _enter_dual_level as _enter_dual_level
from torch._C import _exit_dual_level as _exit_dual_level
from torch._C import _get_dispatch_stack_at as _get_dispatch_stack_at
from torch._C import _get_function_stack_at as _get_function_stack_at
from torch._C import _InferenceMode as _InferenceMode
from torch._C import _is_any_autocast_enabled as _is_any_autocast_enabled
from torch._C import _len_torch_dispatch_stack as _len_torch_dispatch_stack
from torch._C import _len_torch_function_stack as _len_torch_function_stack
from torch._C import _pop_torch_dispatch_stack as _pop_torch_dispatch_stack
from torch._C import _pop_torch_function_stack as _pop_torch_function_stack
from torch._C import _push_on_torch_dispatch_stack as _push_on_torch_dispatch_stack
from torch._C import _push_on_torch_function_stack as _push_on_torch_function_stack
from torch._C import _set_grad_enabled as _set_grad_enabled
from torch.nn.attention import _cur_sdpa_kernel_backends as _cur_sdpa_kernel_backends
from torch.nn.attention import _sdpa_kernel as _sdpa_kernel

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
autograd_function: Any = torch.autograd.function
"""Module whose `_bind_default_args` PyTorch looks up when it applies a function in C (`APPLY_IS_IN_C`)."""
APPLY_IS_IN_C = not hasattr(torch.autograd.Function.apply, "__func__")
"""True since 2.15: an `apply` that was bound earlier then never passes a Python method again."""
PythonNode: Any = torch._C._FunctionBase
"""Base of the graph nodes of `autograd.Function`, which a `GradientEdge` made by hand would not keep alive."""
DisableTorchFunction: Any = torch._C.DisableTorchFunction
"""Context manager that turns off `__torch_function__`, so that ops on ids inside a dispatch mode are not seen."""
functorch: Any = torch._C._functorch
"""Counts and leaves the transforms (`grad`, `vmap`, `jvp`) that a thread is in."""
default_device: Any = torch._GLOBAL_DEVICE_CONTEXT
"""Has the mode that `torch.set_default_device` entered in this thread as `device_context`."""
device_module: Any = torch.utils._device
"""Has the default device as `CURRENT_DEVICE`."""
dispatch_flags: dict[str, Any] = vars(torch.utils._python_dispatch)
"""Has the flags by which PyTorch knows that a dispatch mode is on."""
FLAGS = {
    "old_dispatch_mode_flags": "_is_in_torch_dispatch_mode",
    "old_non_infra_dispatch_mode_flags": "_is_in_non_infra_torch_dispatch_mode",
    "old_without_ignore_compile_internals_dispatch_mode_flags": "_is_in_any_mode_without_ignore_compile_internals",
}
"""These flags by the attribute in which each such mode saves them; older versions lack the last."""
FLAGS = {saved: flag for saved, flag in FLAGS.items() if flag in dispatch_flags}
MODULE_CALL_CODE: CodeType = torch.nn.Module._call_impl.__code__
"""The code of a module's call with its hooks: whose frames are on the stack tells which modules are being called."""
set_compiler_flag: Callable[[bool], object] = getattr(
    torch._C._dynamo.guards, "set_is_in_mode_without_ignore_compile_internals", bool
)
"""Sets the compiler's copy of the last flag, in C; does nothing where there is none."""
is_functional_tensor = torch._is_functional_tensor
"""Tells the wrappers of functionalization, whose storage does not have their values."""


def decomposition_table() -> Any:
    """Return PyTorch's table from ops to functions that compute them by simpler ops; takes a second to import."""
    from torch._decomp import decomposition_table as table

    return table


def load_forward_rules() -> None:
    """Import the forward rules that PyTorch imports with the first dual tensor, without its warning about them.

    They are written in TorchScript, of which PyTorch 2.15 warns in the user's terminal.
    """
    rules = "torch._decomp.decompositions_for_jvp"
    if rules not in sys.modules:
        with safe_context(warnings.catch_warnings()):
            warnings.filterwarnings("ignore", message=".*torch.jit.script.* is deprecated")
            import_module(rules)


def derivative_is_missing(error: Exception) -> bool:
    """Return True for the error about an op without a reverse or forward rule."""
    return isinstance(error, NotImplementedError) or "is not implemented" in str(error)


dual_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level")
"""Returns the level of forward differentiation that PyTorch counts in Python, -1 for none."""


def set_dual_level(level: int) -> None:
    forward_ad._current_level = level


def eval_frame_module() -> Any:
    """Return the module of the compiler that has its stance and its backends, or None if it is not imported.

    Nor is it while another thread imports it: what the module defines last is not there yet, and nothing is compiled.
    """
    module = sys.modules.get("torch._dynamo.eval_frame")
    return module if hasattr(module, "OptimizedModule") else None


def is_compiled(module: Any) -> bool:
    """Return True if calls of a module run compiled: it is what `torch.compile` returns, or was compiled in place."""
    frames = eval_frame_module()
    if frames is None:
        return False
    return isinstance(module, frames.OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None


# For training.

unsafe_view: Any = torch.ops.aten._unsafe_view
"""`view` whose result is no view for autograd, so that it can be the output of a function and written to in place."""
REPLICATE_MODULE = "torch.distributed._composable.replicate"
"""The module of the wrapper class that `replicate` gives a module; looked up in `sys.modules`, never imported."""


def in_function_transform() -> bool:
    """Return True inside vmap, grad or jvp of `torch.func`, or under forward-mode AD, which has no public test."""
    return functorch.peek_interpreter_stack() is not None or dual_level() >= 0


def in_torch_mode() -> bool:
    """Return True under a function or dispatch mode, which is to see every operation of a forward."""
    return bool(_len_torch_dispatch_stack() or _len_torch_function_stack())


def active_ddp_module() -> Any:
    """Return the `DistributedDataParallel` wrapper whose forward is running, or None."""
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module


def current_backward_id() -> int:
    """Return an id of the running backward, to do something once for each."""
    return torch._C._current_graph_task_id()


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Call a function at the end of the running backward, as FSDP and DDP do."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[no-untyped-call]


def default_store() -> Any:
    """Return the key-value store of the default process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()  # type: ignore[no-untyped-call]


def fsdp_state(module: Any) -> tuple[Any, Any]:
    """Return the state that `fully_shard` keeps of a module, and its groups of parameters."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # older versions have one group or none
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return state, groups


def shard_offset(tensor: Any) -> Any:
    """Return where the local shard of a `DTensor` starts in the whole; slow to import."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1]


# For `eg.top`.


def set_backward_threads(enabled: bool) -> None:
    """Let a backward run in threads of its own or in this one; the public context manager can lose an interrupt."""
    torch._C._set_multithreading_enabled(enabled)


def backward_threads_enabled() -> bool:
    return torch._C._is_multithreading_enabled()


def is_inplace_error(error: BaseException | str) -> bool:
    """Return True if a tensor that the graph saved was changed in place since."""
    return "modified by an inplace operation" in str(error)


def is_freed_graph_error(error: BaseException | str) -> bool:
    """Return True if `backward()` freed the graph."""
    return "backward through the graph a second time" in str(error)


def is_frozen_leaf_error(error: BaseException) -> bool:
    """Return True if the function freezes a parameter, which a computed tensor stands for and does not allow."""
    return "change requires_grad flags of leaf" in str(error)


def is_fused_attention_error(error: BaseException) -> bool:
    """Return True if a fused attention kernel lacks a derivative which the plain kernel has."""
    return "scaled_dot_product" in str(error)


is_zero_tensor = torch.Tensor._is_zerotensor
"""Tells tensors of zeros without memory, as some derivative rules return."""


def storage_uses(x: torch.Tensor) -> int:
    """Return how many tensors hold the storage of x, the look at it included; there is no public count."""
    storage = x.untyped_storage()  # held while it counts: older versions would not include it otherwise
    return _storage_Use_Count(storage._cdata)


def to_list(x: torch.Tensor) -> list[Any]:
    """Return the values of a tensor, in order; inside `torch.func.grad` older versions read them one by one alone."""
    try:
        return x.reshape(-1).tolist()
    except RuntimeError:
        return [value.item() for value in x.reshape(-1)]


def is_compiling() -> bool:
    """Return True while the compiler traces; older versions do not say so in a function that they run as one step."""
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


def version_of(x: torch.Tensor) -> int:
    """Return the counter that writes in place increase."""
    return x._version


def output_bytes(node: Any) -> list[int]:
    """Return the bytes of the derivatives that arrive at a node of the graph; no public attribute has them."""
    return [math.prod(each.shape) * each.dtype.itemsize for each in node._input_metadata]


REENTRANT_CHECKPOINT = "CheckpointFunction"
"""The name in `torch.utils.checkpoint` of what reentrant checkpoints run by."""


def other_checkpoint(module: Any) -> str:
    """Return the name in `torch.utils.checkpoint` of the generator that other checkpoints run by."""
    name = "_checkpoint_without_reentrant_generator"
    return f"{name}_impl" if hasattr(module, f"{name}_impl") else name  # the first since 2.15, the second since 2.1


def node_number(node: Any) -> int:
    """Return the number of a node of the graph, which grows in the order of computation."""
    return int(node._sequence_nr())


# What PyTorch's errors about gradients mean, by their text: it raises RuntimeError for all of them.


def is_leaf_write_error(text: str) -> bool:
    return "leaf Variable that requires grad" in text


def is_unused_error(text: str) -> bool:
    """Return True if `torch.autograd.grad` was given an input that the output does not depend on."""
    return "appears to not have been used in the graph" in text


def is_untracked_error(text: str) -> bool:
    """Return True if backward was called on a tensor without a graph."""
    return "does not require grad" in text


def operation_without_derivative(text: str) -> str | None:
    """Return the name of the operation that has no derivative."""
    match = re.search(r"(?:derivative for '?(?:aten::)?|: )(\w+)'? is not implemented", text)
    return None if match is None else match.group(1).strip("_")


def argument_without_derivative(text: str) -> tuple[str, str] | None:
    """Return the function and the argument by which it has no derivative, such as the statistics of a batch norm."""
    match = re.search(r"function '(\w+)' is not differentiable with respect to argument '(\w+)'", text)
    return None if match is None else (match.group(1).removeprefix("native_"), match.group(2))


def overwritten_shape(text: str) -> tuple[int, ...] | None:
    """Return the shape of the tensor of an in-place error, if it names one."""
    match = re.search(r"\[torch\.\w+ \[([\d, ]*)\]\]", text)
    return tuple([int(size) for size in match.group(1).split(",") if size.strip()]) if match else None


def overwritten_maker(text: str) -> str | None:
    """Return the function that made the tensor of an in-place error, if it names one."""
    match = re.search(r"output \d+ of (\w+?)(?:Backward)?\d*,", text)
    return match.group(1).lower() if match else None


# For explanations.

MAKE_SUBCLASS = "_make_subclass"
"""The method of `torch.Tensor` that makes parameters of plain tensors, which cuts them off and no mode sees."""


# For cones.

disabled_torch_function: Any = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a subclass that only its `__torch_dispatch__` is to see; documented, but private."""


class PlainDispatchMode(TorchDispatchMode):
    """A dispatch mode whose dispatch PyTorch leaves as it is; all of ours are such.

    Since 2.9 it wraps that of other modes to keep `torch.compile` off it, which leaves code under a mode alone anyway.
    The wrapper takes as long as the dispatch itself, and the first call imports the compiler and, where it is there,
    triton: as slow as importing PyTorch, and triton 3.9 ends a process that has imported TensorFlow.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def make_wrapper_subclass(cls: type, like: torch.Tensor, device: Any) -> Any:
    """Return a tensor of a subclass with the shape of `like` and no memory; the only way to make one."""
    return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        cls,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=device,
    )


def schema_of(func: Any) -> Any:
    return func._schema


@cache
def operation_name(func: Any) -> str:
    """Return the name of an operation without its overload, such as `convolution`."""
    return func._schema.name.removeprefix("aten::")


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the tensors that an operation writes to."""
    written = []
    for position, name in _written_parameters(func):
        given = args[position] if position < len(args) else kwargs.get(name)
        written += [given] if isinstance(given, torch.Tensor) else []
    return written


@cache
def _written_parameters(func: Any) -> list[tuple[int, str]]:
    return [
        (position, parameter.name)
        for position, parameter in enumerate(func._schema.arguments)
        if parameter.alias_info is not None and parameter.alias_info.is_write
    ]


def returns_views(func: Any) -> bool:
    return any(each.alias_info is not None for each in func._schema.returns)


def takes_device(func: Any) -> bool:
    return any(parameter.name == "device" for parameter in func._schema.arguments)


def shape_depends_on_values(func: Any) -> bool:
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags


def is_pointwise(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags


def is_seeded(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def to_functional(x: torch.Tensor) -> Any:
    """Return a tensor whose writes PyTorch turns into plain operations while functionalization is enabled."""
    return torch._to_functional_tensor(x)


def from_functional(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a functional one stands for, with all that was written to it."""
    if not torch._is_functional_tensor(x):
        return x
    torch._sync(x)  # type: ignore[attr-defined]
    return torch._from_functional_tensor(x)


def enable_functionalization() -> None:
    torch._enable_functionalization(reapply_views=True)


def disable_functionalization() -> None:
    torch._disable_functionalization()


def changes_shape(func: Any) -> bool:
    """Return True if an operation changes the shape of a tensor in place."""
    return torch.Tag.inplace_view in func.tags


def storage_key(x: torch.Tensor) -> int:
    """Return a number that live tensors share if they share their storage; meta tensors have no address to compare."""
    return x.untyped_storage()._cdata


def upsample(name: str, x: torch.Tensor, sizes: list[int], scales: list[float | None], *corners: bool) -> torch.Tensor:
    """Resize the last axes of a tensor, with the scales that the caller gave and not the ratios of sizes."""
    return getattr(torch.ops.aten, name).default(x, sizes, *corners, *scales)


def tree_map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, function, tree)


@contextmanager
def replace_function_apply(replace: Callable[..., Any]) -> Iterator[None]:
    """Replace `autograd.Function.apply`, which no mode sees. An `apply` that was bound before stays as it was."""
    function: Any = torch.autograd.Function
    original = vars(function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return replace(original.__get__(None, cls), cls, *args, **kwargs)

    with scope():
        defer(setattr, function, "apply", original)
        function.apply = classmethod(apply)
        yield


# Watching a run. Every call of a module goes through this attribute of its own, if it is not None; `Module.compile()`
# sets it, and copies and pickles of a module leave it out. What it calls otherwise is `_call_impl`.
MODULE_CALL = "_compiled_call_impl"
# The module in which `clip_grad_norm_` looks up the function that computes the norm, however users imported the former.
clip_grad: Any = import_module("torch.nn.utils.clip_grad")
TOTAL_NORM = "_get_total_norm"
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Returns a number for the backward that runs in this thread, and -1 outside of any."""


def compiled_wrapper() -> Any:
    """Return the class of what `torch.compile(model)` returns, or None if nothing is compiled yet."""
    return getattr(eval_frame_module(), "OptimizedModule", None)


def call_module(module: Any) -> Callable[..., Any]:
    """Return what a call of a module calls now."""
    return getattr(module, MODULE_CALL) or module._call_impl


def is_compiled_wrapper(module: Any) -> bool:
    """Return True for what `torch.compile(model)` returns."""
    return type(module).__module__.startswith("torch._dynamo.")


def optimizer_hooks(optimizer: Any) -> tuple[Any, Any]:
    """Return the hooks that an optimizer calls before and after a step."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def all_optimizers_hooks() -> Any:
    """Return the hooks that every optimizer calls before a step."""
    return import_module("torch.optim.optimizer")._global_optimizer_pre_hooks


def forward_hooks(module: Any) -> Any:
    return module._forward_hooks


def forward_pre_hooks_with_kwargs(module: Any) -> tuple[Any, Any]:
    """Return the two places that a hook must be in to get keyword arguments, in the order to put it there."""
    return module._forward_pre_hooks_with_kwargs, module._forward_pre_hooks


# `GradScaler`: for each optimizer, whether its gradients were unscaled since the last update. No public state has it.
def optimizer_stages(scaler: Any) -> Any:
    return scaler._per_optimizer_states


def set_optimizer_stages(scaler: Any, stages: Any) -> None:
    scaler._per_optimizer_states = stages
