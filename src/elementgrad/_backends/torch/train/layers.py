"""One parameter of a model, some of whose elements train: leaves hold their values, the tensor is kept current.

Some entries of the gradient of a table of which rows were looked up.

Sums and means of rows of a table, whose elements get their gradients from the tokens that looked them up.

Multi-head attention, whose projections are linear layers inside of one function of PyTorch's.

Layers that know some of their elements: mixed into a module's class, they send gradients there by kernels.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional

from elementgrad._backends.torch._compat import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from elementgrad._backends.torch.distributed import require_met
from elementgrad._backends.torch.train import parameter
from elementgrad._backends.torch.train.kernels import (
    AliasFunction,
    ConvolutionOp,
    LayerNormOp,
    LinearOp,
    LookupFunction,
    NoGradientFunction,
    RMSNormOp,
    TorchConvGrid,
    TorchCorrelation,
    TorchProduct,
    again,
    by_kernel,
    connected,
    index,
)
from elementgrad._backends.torch.train.parameter import (
    ParameterStorage,
    TorchElementGroup,
    cast,
    part_of,
    same,
    while_training,
)
from elementgrad._train.trainer import PartialParameter
from elementgrad.errors import FrameworkError, OptionError

Tensor = torch.Tensor
_moving: WeakKeyDictionary[torch.optim.Optimizer, "list[TorchPartialParameter]"] = WeakKeyDictionary()
"""For each optimizer in the middle of a step, the parameters whose elements it moves."""


class TorchPartialParameter(PartialParameter):
    """A parameter and the parts of it that train."""

    def __init__(self, home: ParameterStorage):
        self.home = home
        self.tensor = home.tensor
        self.groups: list[TorchElementGroup] = []
        self._used = False
        self.arrange()

    def arrange(self) -> None:
        """Make ready for the parts there are, on the device where the parameter is."""
        self.leaves = tuple([part.leaf for part in self.groups])
        self.keys = tuple([part.key for part in self.groups])
        self.sizes = [len(part.positions) for part in self.groups]
        self.everywhere = np.concatenate([np.zeros(0, dtype=np.int64), *[part.positions for part in self.groups]])
        self.positions = index(self.everywhere, self.tensor.device)
        for part in self.groups:
            part.parameter = self
            part.originals = part.originals.to(self.tensor.device)
        self._note()
        self._need_hooks()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # a copy of a model, or one from a file, whose elements train as well
        self._need_hooks()

    def _need_hooks(self) -> None:
        (parameter.need if self.groups else parameter.done)(self)

    @property
    def live(self) -> Tensor:
        """The parameter to compute with: itself, or all of it where some is in other processes."""
        whole = self.home.whole
        return self.tensor if whole is None else whole

    def current(self) -> None:
        """Let the parameter hold what the leaves hold, or the leaves what was written to the parameter since."""
        if torch.compiler.is_compiling():
            if self.home.spread:  # what is gathered when is not known to a compiler: the graph breaks here
                _apart(self)
            else:  # nor are versions
                self.home.put(self.positions, self._values())
            return
        require_met(self.leaves)
        versions = self._versions()
        # Writes to `.data` leave no version behind: after a step that nobody announced, values are compared.
        if versions[1:] != self._seen[1:] or (self._used and not torch.equal(self._values(), self._held)):
            self.write_to_parameter()
        elif versions != self._seen:
            self.read_from_parameter()
        self._used = True

    def ready(self) -> None:
        """Let the leaves hold what was written to the parameter since, before a step that is pushed in any case."""
        versions = self._versions()
        if versions[0] != self._seen[0] and versions[1:] == self._seen[1:]:
            self.read_from_parameter()
        self.require_kept()

    def require_kept(self) -> None:
        """Refuse to go on where a parameter was written to without a trace, and what was written would be lost."""
        if not self.home.kept(self.positions, self._held):
            raise FrameworkError(
                "shards of the model were written to in place, as torch.distributed.checkpoint does, and elements that "
                "train do not know of it; call model.load_state_dict with what was loaded"
            )

    def write_to_parameter(self) -> None:
        """Write the leaves' values into the parameter."""
        self._note()
        self.home.put(self.positions, self._held)
        self._seen[0] = self.tensor._version

    def read_from_parameter(self) -> None:
        """Read the leaves' values from the parameter, where it holds others than theirs."""
        with torch.no_grad():
            held = self.home.take(self.positions)
            for leaf, found in zip(self.leaves, held.split(self.sizes), strict=True):
                leaf.copy_(torch.where(same(cast(leaf, found.dtype), found), leaf, cast(found, leaf.dtype)))
        self._note()

    def with_values(self, tensor: Tensor, leaves: Iterable[Tensor]) -> Tensor:
        """Another tensor with the elements in it, as a step that every transform can differentiate."""
        values = torch.cat([leaf.reshape(-1) for leaf in leaves]).to(tensor.dtype)
        return tensor.reshape(-1).index_put((self.positions,), values).view(tensor.shape)

    def _values(self) -> Tensor:
        return self.leaves[0].detach() if len(self.leaves) == 1 else torch.cat([leaf.detach() for leaf in self.leaves])

    def _versions(self) -> list[int]:
        return [self.tensor._version, *[leaf._version for leaf in self.leaves]]

    def _note(self) -> None:
        self._seen = self._versions()
        self._held = self._values().clone() if self.leaves else self.positions
        self._used = False


@torch.compiler.disable
def _apart(weight: TorchPartialParameter) -> None:
    weight.current()


@while_training(_global_optimizer_pre_hooks)
def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """What was written to a parameter since the last forward is where its elements step from."""
    _moving[optimizer] = weights = _moved(optimizer)
    if weights and isinstance(optimizer, torch.optim.SparseAdam):
        raise OptionError("SparseAdam takes sparse gradients, and those of elements are dense; use torch.optim.Adam")
    for weight in weights:
        weight.ready()


@while_training(_global_optimizer_post_hooks)
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """What an optimizer moved is in the model at once, however the optimizer wrote it."""
    for weight in _moving.pop(optimizer, ()):
        weight.write_to_parameter()


def _moved(optimizer: torch.optim.Optimizer) -> list[TorchPartialParameter]:
    """The parameters whose elements an optimizer has."""
    weights = {}
    for group in optimizer.param_groups:
        for leaf in group["params"]:
            part = part_of(leaf)
            if part is not None and part.parameter is not None and part in part.parameter.groups:
                weights[id(part.parameter)] = part.parameter
    return list(weights.values())


ROOM = 1 << 16
"""Numbers that are summed without asking first which rows occur."""


class TorchLookup:
    """Entries (row, column) of what `index_add_` of gradients to the rows looked up would give.

    >>> import torch
    >>> from elementgrad._backends.torch.train.layers import TorchLookup
    >>> lookup = TorchLookup([0, 7], [1, 0], columns=2, device="cpu")
    >>> lookup(torch.tensor([7, 3, 7]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    tensor([0., 6.])
    """

    def __init__(self, row: "np.ndarray", column: "np.ndarray", columns: int, device: torch.device | str):
        rows, row_of = np.unique(np.asarray(row, dtype=np.int64), return_inverse=True)
        some, column_of = np.unique(np.asarray(column, dtype=np.int64), return_inverse=True)
        self._rows, self._row_of = index(rows, device), index(row_of, device)
        self._columns = None if len(some) == columns else index(some, device)
        self._column_of = index(column_of, device)
        cell = row_of.reshape(-1) * len(some) + column_of.reshape(-1)
        self._cell = None if np.array_equal(cell, np.arange(len(rows) * len(some))) else index(cell, device)
        self._width = len(some)
        self._alone = (int(rows[0]), int(some[0])) if len(row_of) == 1 else None
        self._crowded = len(rows) * len(some) > ROOM + 4 * len(row_of)

    def __call__(self, tokens: Tensor, gradient: Tensor) -> Tensor:
        """The entries, for n tokens and the gradients of the n rows that they looked up."""
        if not len(self._row_of):
            return gradient.new_zeros(0)
        count = len(self._rows)
        if self._alone is not None:
            row, column = self._alone
            return gradient.select(1, column).masked_fill(tokens != row, 0).sum(0, keepdim=True)
        gradient = gradient if self._columns is None else gradient.index_select(1, self._columns)
        if count == 1:
            sums = gradient.masked_fill((tokens != self._rows).unsqueeze(1), 0).sum(0)
        else:
            near = torch.searchsorted(self._rows, tokens).clamp(max=count - 1)
            hit = self._rows.index_select(0, near) == tokens
            if self._crowded and not torch.compiler.is_compiling():
                return self._of_present(near[hit], gradient[hit])
            place = near.where(hit, count)
            sums = gradient.new_zeros(count + 1, self._width).index_add(0, place, gradient)[:count].view(-1)
        return sums if self._cell is None else sums.index_select(0, self._cell)

    def connected(self, table: Tensor, values: Tensor) -> Tensor:
        """The table, connected with the values of its elements."""
        column = self._column_of if self._columns is None else self._columns.index_select(0, self._column_of)
        return connected(table, self._rows.index_select(0, self._row_of) * table.shape[1] + column, values)

    def _of_present(self, hits: Tensor, gradient: Tensor) -> Tensor:
        """Sums for the rows alone that occur: far fewer than all that were named."""
        present, place = hits.unique(return_inverse=True)
        sums = gradient.new_zeros(len(present) + 1, self._width).index_add(0, place, gradient)
        at = torch.full_like(self._rows, len(present)).index_copy_(0, present, torch.arange(len(present)).to(present))
        return sums.view(-1).index_select(0, at.index_select(0, self._row_of) * self._width + self._column_of)


class BagFunction(torch.autograd.Function):
    """What an embedding bag computes; each token hears the gradient of its bag, times its weight there."""

    @staticmethod
    def forward(
        ctx: Any,
        lookup: Any,
        sizes: Sequence[int],
        run: Callable[[Tensor, Tensor | None], Tensor],
        tokens: Tensor,
        bags: Tensor,
        share: Tensor,
        often: Tensor | None,
        table: Tensor,
        weights: Tensor | None,
        *leaves: Tensor,
    ) -> Tensor:
        ctx.lookup, ctx.sizes = lookup, sizes
        ctx.rows = table.shape
        needed = (table, weights, *leaves) if ctx.needs_input_grad[8] else (None, weights)
        ctx.save_for_backward(tokens, bags, share, often, *needed)
        return run(table, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        tokens, bags, share, often, table, weights, *values = ctx.saved_tensors
        heard = gradient.index_select(0, bags) * share.unsqueeze(1)
        known = tokens.clamp(min=0)
        of_weights = None
        if ctx.needs_input_grad[8]:
            table = ctx.lookup.connected(table, torch.cat(values)) if again() else table
            of_weights = (heard * table.index_select(0, known)).sum(1).reshape(weights.shape)
        if weights is not None:
            heard = heard * weights.reshape(-1, 1)
        if often is not None:
            heard = heard / often.unsqueeze(1)
        of_table = None
        if ctx.needs_input_grad[7]:
            of_table = gradient.new_zeros(ctx.rows).index_add(0, known, heard.masked_fill((tokens < 0).unsqueeze(1), 0))
        leaves = ctx.lookup(tokens, heard).split_with_sizes(ctx.sizes)
        return None, None, None, None, None, None, None, of_table, of_weights, *leaves


def bag(
    layer: Any,
    run: Callable[[Tensor, Tensor | None], Tensor],
    use: Any,
    table: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
) -> Tensor:
    """The layer's output for a table that trains in part."""
    tokens = ids.reshape(-1)
    bags = _bags(ids, offsets, layer.include_last_offset)
    if layer.padding_idx is not None:
        tokens = tokens.where(tokens != layer.padding_idx, -1)
    counted = (tokens >= 0).to(table.dtype)
    share = counted
    if layer.mode == "mean":
        count = len(ids) if offsets is None else len(offsets) - layer.include_last_offset
        share = counted / counted.new_zeros(count).index_add(0, bags, counted).clamp(min=1).index_select(0, bags)
    often = None
    if layer.scale_grad_by_freq:
        _, place, count_of = tokens.unique(return_inverse=True, return_counts=True)
        often = count_of[place]
    leaves = use.weight.leaves
    return BagFunction.apply(use.kernel, use.weight.sizes, run, tokens, bags, share, often, table, weights, *leaves)


def _bags(ids: Tensor, offsets: Tensor | None, closed: bool) -> Tensor:
    """Which bag each token is in."""
    if offsets is None:
        return torch.arange(len(ids), device=ids.device).repeat_interleave(ids.shape[1])
    starts = offsets[:-1] if closed else offsets
    return torch.searchsorted(starts, torch.arange(len(ids), device=ids.device).to(starts.dtype), right=True) - 1


INSIDE = ("_in_projection_packed", "_in_projection", "multi_head_attention_forward")
"""The functions of PyTorch's through which a projection is reached, the innermost first."""


class ProjectionRows:
    """The elements that train of some rows of a projection: all others hear nothing of it."""

    def __init__(self, weight: TorchPartialParameter, first: int, count: int):
        columns = weight.tensor.shape[1]
        row, column = np.divmod(weight.everywhere, columns)
        here = np.flatnonzero((row >= first) & (row < first + count))
        self._product = TorchProduct(row[here] - first, column[here], count, columns, weight.tensor.device)
        self._here = index(here, weight.tensor.device)
        self._total = len(row)

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        """The gradients of all elements of the weight."""
        found = self._product(left, right)
        return found.new_zeros(self._total).index_copy(0, self._here, found)

    def connected(self, weight: Tensor, values: Tensor) -> Tensor:
        """The rows, connected with the values of their elements."""
        return self._product.connected(weight, values.index_select(0, self._here))


class AttentionProjections:
    """The weights of one attention that train in part, and the kernels of their rows."""

    def __init__(self, weights: list[TorchPartialParameter]):
        self._weights = weights
        self._rows: dict[tuple[int, int, int], ProjectionRows] = {}

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`functional.linear`, where the weight may be some rows of one that trains."""
        for number, known in enumerate(self._weights):
            tensor = known.live
            if weight.ndim == 2 and weight.is_contiguous() and _within(weight, tensor):
                first = (weight.storage_offset() - tensor.storage_offset()) // tensor.shape[1]
                key = number, first, len(weight)
                if key not in self._rows:
                    self._rows[key] = ProjectionRows(known, first, len(weight))
                rows = tensor if len(weight) == len(tensor) else tensor.narrow(0, first, len(weight))
                kernels, sizes = (self._rows[key], None), (known.sizes, ())
                return by_kernel(LinearOp(), kernels, sizes, x, rows, bias, *known.leaves)
        return functional.linear(x, weight, bias)

    def attend(self, layer: Any, *arguments: Any, **options: Any) -> Any:
        """What the layer computes, by PyTorch's own code, in which `linear` is ours."""
        others: dict[str, Any] = {"linear": self.linear}
        for name in INSIDE:
            others[name] = _with(getattr(functional, name), others)
        forward = _with(nn.MultiheadAttention.forward, {"F": SimpleNamespace(**(vars(functional) | others))})
        return forward(layer, *arguments, **options)


def _within(weight: Tensor, tensor: Tensor) -> bool:
    """Whether a matrix lies in another one's memory, in whole rows."""
    return (
        tensor.is_contiguous()
        and weight.shape[1] == tensor.shape[1]
        and weight.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        and 0 <= weight.storage_offset() - tensor.storage_offset() <= tensor.numel() - weight.numel()
    )


def _with(function: Callable[..., Any], others: dict[str, Any]) -> Any:
    """The same code with other meanings of some global names."""
    function = inspect.unwrap(function)
    other = FunctionType(
        function.__code__,
        {**function.__globals__, **others},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    other.__kwdefaults__ = function.__kwdefaults__
    return other


Module = nn.Module


class LayerKernel:
    """A parameter that trains in part, in one module: with the kernel that fits there."""

    def __init__(self, weight: TorchPartialParameter):
        self.weight = weight
        self.kernel: Any = None


NOBODY = LayerKernel(TorchPartialParameter(ParameterStorage(torch.empty(0))))


def found(module: Any, name: str) -> tuple[Any, LayerKernel | None]:
    """The tensor to compute with, and whose elements are to hear of it."""
    held = module._parameters
    if name not in held:  # computed, as by a parametrization
        return getattr(module, name, None), None
    tensor = held[name]
    use = module._trained.get(name)
    if use is None:
        return tensor, None
    weight = use.weight
    if len(weight.keys) == 1:
        leaves: tuple[Any, ...] = (held[weight.keys[0]],)
        own = leaves[0] is weight.leaves[0]
    else:
        leaves = tuple([held[key] for key in weight.keys])
        own = all([leaf is other for leaf, other in zip(leaves, weight.leaves)])  # noqa: B905, C419
    if not weight.home.stands(tensor):  # somebody's own, as functional_call puts there: it counts as it is given
        return tensor if own else weight.with_values(tensor, leaves), None
    if not own:
        return weight.with_values(tensor, leaves), None
    weight.current()
    if not torch.is_grad_enabled() or (weight.home.spread and tensor is weight.tensor):
        return tensor, None  # as it is; of a sharded one, nothing can be computed before it is gathered
    if not torch.compiler.is_compiling() and transforming():
        return weight.with_values(tensor, leaves), None
    return tensor, use


def transforming() -> bool:
    """Whether vmap, grad or jvp of `torch.func`, or forward mode, see each operation."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def aliased(module: Any, name: str) -> Any:
    """The parameter for whatever use of it."""
    tensor, use = found(module, name)
    weight = module._trained[name].weight
    if weight.home.spread and tensor is weight.tensor and torch.is_grad_enabled():
        return looked_at(name, weight, sys._getframe(1).f_globals.get("__name__", ""))
    return tensor if use is None else alias(use.weight)


def elsewhere(weight: TorchPartialParameter) -> Any:
    """The parameter of another module for whatever use of it."""
    weight.current()
    return alias(weight) if torch.is_grad_enabled() and not transforming() else weight.live


def alias(weight: TorchPartialParameter) -> Any:
    """A parameter that passes gradients on to its elements."""
    tensor = AliasFunction.apply(weight.positions, weight.sizes, weight.live, *weight.leaves)
    if not torch.compiler.is_compiling():
        tensor._is_param = True  # so isinstance(module.weight, nn.Parameter) holds as before
    return tensor


def looked_at(name: str, weight: TorchPartialParameter, module: str) -> Any:
    """A sharded parameter for whoever takes it from a module; who shards it must get the very tensor."""
    if module.startswith("torch.distributed."):
        return weight.tensor
    tensor = NoGradientFunction.apply(name, weight.tensor, *weight.leaves)
    tensor._is_param, tensor._elements_of = True, weight.tensor
    return tensor


class Layer:
    """Base of the layers; what they need of a kernel is made when elements come and go."""

    reads: tuple[str, ...] = ()
    """Modules inside whose parameters the layer uses itself, without calling them."""

    def _prepared(self, name: str, weight: TorchPartialParameter) -> Any:
        """The kernel for one parameter."""
        return weight.positions

    def _through(self: Any, operation: Any, x: Tensor) -> Tensor:
        weight, of_weight = found(self, "weight")
        bias, of_bias = found(self, "bias")
        if of_weight is None and of_bias is None:
            return operation.run(x, weight, bias)[0]
        one, other = of_weight or NOBODY, of_bias or NOBODY
        kernels, sizes = (one.kernel, other.kernel), (one.weight.sizes, other.weight.sizes)
        return by_kernel(operation, kernels, sizes, x, weight, bias, *one.weight.leaves, *other.weight.leaves)


class LinearLayer(Layer):
    """`nn.Linear`, and what is made of it."""

    operation = LinearOp()

    def _prepared(self, name: str, weight: TorchPartialParameter) -> Any:
        return _product(weight) if name == "weight" else weight.positions

    def forward(self: Any, input: Tensor) -> Tensor:
        """As the layer's own."""
        return self._through(self.operation, input)


class TransposedLayer(LinearLayer):
    """The linear layer of GPT-2, whose weight lies the other way round."""

    operation = LinearOp(transposed=True)


class EmbeddingLayer(Layer):
    """`nn.Embedding`."""

    def _prepared(self, name: str, weight: TorchPartialParameter) -> Any:
        return _lookup(weight)

    def forward(self: Any, input: Tensor) -> Tensor:
        """As the layer's own."""
        table, use = found(self, "weight")
        if use is None:
            return functional.embedding(input, table, self.padding_idx)
        options = self.padding_idx, self.scale_grad_by_freq
        return LookupFunction.apply(use.kernel, use.weight.sizes, options, input, table, *use.weight.leaves)


class BagLayer(Layer):
    """`nn.EmbeddingBag`, of sums and means; which elements a maximum takes is left to the framework."""

    def _prepared(self, name: str, weight: TorchPartialParameter) -> Any:
        return _lookup(weight)

    def forward(
        self: Any, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """As the layer's own."""
        table, use = found(self, "weight")
        if use is None or self.mode == "max":
            return super().forward(input, offsets, per_sample_weights)  # type: ignore[misc]

        def run(table: Tensor, weights: Tensor | None) -> Tensor:
            options = self.max_norm, self.norm_type, False, self.mode, False, weights, self.include_last_offset
            return functional.embedding_bag(input, table, offsets, *options, self.padding_idx)

        return bag(self, run, use, table, input, offsets, per_sample_weights)


class ConvolutionLayer(Layer):
    """Convolutions of one to three axes."""

    def _prepared(self: Any, name: str, weight: TorchPartialParameter) -> Any:
        if name != "weight":
            return weight.positions
        shape = tuple(weight.tensor.shape)
        return TorchCorrelation(np.unravel_index(weight.everywhere, shape), shape, self._grid(), weight.tensor.device)

    def _grid(self: Any) -> TorchConvGrid:
        padding = self.padding
        if self.padding_mode != "zeros" or padding == "valid":
            padding = (0,) * len(self.stride)
        elif padding == "same":
            around = self._reversed_padding_repeated_twice[::-1]
            padding = tuple(around[::2])
        return TorchConvGrid(self.stride, padding, self.dilation, self.groups)

    def forward(self: Any, input: Tensor) -> Tensor:
        """As the layer's own."""
        around = self._reversed_padding_repeated_twice
        if (
            input.ndim != len(self.stride) + 2
            or input.is_complex()
            or (self.padding == "same" and around[::2] != around[1::2])
        ):
            return super().forward(input)  # type: ignore[misc]
        if self.padding_mode != "zeros":
            input = functional.pad(input, around, mode=self.padding_mode)
        return self._through(ConvolutionOp(self._grid()), input)


class LayerNormLayer(Layer):
    """`nn.LayerNorm`."""

    def forward(self: Any, input: Tensor) -> Tensor:
        """As the layer's own."""
        if self._parameters.get("weight") is None or torch.is_autocast_enabled(input.device.type):
            return super().forward(input)  # type: ignore[misc]
        return self._through(LayerNormOp(self.normalized_shape, self.eps), input)


class RMSNormLayer(Layer):
    """`nn.RMSNorm`."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """As the layer's own."""
        if torch.is_autocast_enabled(x.device.type):
            return super().forward(x)  # type: ignore[misc]
        return self._through(RMSNormOp(self.normalized_shape, self.eps), x)


class AttentionLayer(Layer):
    """`nn.MultiheadAttention`: its own projections, and that of its output."""

    reads = ("out_proj",)

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        """As the layer's own."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or transforming():
            return super().forward(*arguments, **options)  # type: ignore[misc]
        modules = self, *[getattr(self, name) for name in self.reads]
        held = [(module, name) for module in modules for name in getattr(module, "_trained", ()) if "weight" in name]
        uses = [use for _, use in [found(module, name) for module, name in held] if use is not None]
        return AttentionProjections([use.weight for use in uses]).attend(self, *arguments, **options)


LAYERS: dict[str, type[Layer]] = {
    "torch.nn.modules.linear.Linear": LinearLayer,
    "transformers.pytorch_utils.Conv1D": TransposedLayer,
    "torch.nn.modules.sparse.Embedding": EmbeddingLayer,
    "torch.nn.modules.sparse.EmbeddingBag": BagLayer,
    "torch.nn.modules.conv.Conv1d": ConvolutionLayer,
    "torch.nn.modules.conv.Conv2d": ConvolutionLayer,
    "torch.nn.modules.conv.Conv3d": ConvolutionLayer,
    "torch.nn.modules.activation.MultiheadAttention": AttentionLayer,
    "torch.nn.modules.normalization.LayerNorm": LayerNormLayer,
    "torch.nn.modules.normalization.RMSNorm": RMSNormLayer,
}
"""Classes whose computation is known, by name: the libraries they are from need not be there."""


def layer_of(plain: type) -> tuple[type, type[Layer]] | None:
    """The class that is known, of which another is or is made, and what is known about it."""
    names = [(kind, f"{kind.__module__}.{kind.__qualname__}") for kind in plain.__mro__]
    return next(((kind, LAYERS[name]) for kind, name in names if name in LAYERS), None)


def _product(weight: TorchPartialParameter) -> TorchProduct:
    rows, columns = weight.tensor.shape
    row, column = np.divmod(weight.everywhere, columns)
    return TorchProduct(row, column, rows, columns, weight.tensor.device)


def _lookup(weight: TorchPartialParameter) -> TorchLookup:
    row, column = np.divmod(weight.everywhere, weight.tensor.shape[1])
    return TorchLookup(row, column, weight.tensor.shape[1], weight.tensor.device)
