"""Contracts with PyTorch: behaviour that the backend relies on, which a new version could change."""

import copy
import inspect
import re
import sys

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._dynamo.eval_frame import cached_backends
from torch.multiprocessing.reductions import StorageWeakRef

from elementgrad._backends.torch import _compat
from elementgrad._backends.torch._compat import (
    APPLY_IS_IN_C,
    REENTRANT_CHECKPOINT,
    FunctionMeta,
    autograd_function,
    is_compiling,
    other_checkpoint,
    to_list,
)
from elementgrad._backends.torch.isolate import DRAWING, STATELESS

pytestmark = pytest.mark.contract


def test_pytorch_runs_an_allowed_function_in_the_graph_with_plain_python_inside():
    seen = []

    @torch.compiler.allow_in_graph
    def step(x, index):
        seen.append((is_compiling(), torch.compiler.is_dynamo_compiling(), index))
        return x[np.asarray([1]).tolist()]

    def outer(x):
        assert torch.compiler.is_dynamo_compiling()
        return step(x, (slice(0, 2), ...)) * 2

    assert torch.compile(outer, fullgraph=True, backend="aot_eager")(torch.ones(3)).tolist() == [2]
    assert all(entry == (True, False, (slice(0, 2), ...)) for entry in seen)
    assert seen


def test_pytorch_knows_whether_anything_was_compiled():
    torch.compiler.reset()
    assert not any(cached_backends.values())
    torch.compile(lambda x: x + 1, backend="aot_eager")
    assert any(cached_backends.values())


def test_pytorch_vmap_refuses_to_write_a_mapped_value_into_a_shared_tensor():
    def write(v):
        y = torch.zeros(3)
        y[0] = v
        return y

    with pytest.raises(RuntimeError, match="vmap: inplace"):
        torch.func.vmap(write)(torch.ones(2))
    assert torch.func.vmap(lambda v: torch.zeros(3).index_put((torch.tensor(0),), v))(torch.ones(2)).shape == (2, 3)


def test_pytorch_cannot_read_a_mapped_tensor():
    with pytest.raises((RuntimeError, TypeError)):
        torch.func.vmap(lambda i: torch.tensor(i.numpy(force=True)))(torch.tensor([0, 1]))


def test_pytorch_indexes_with_a_traced_scalar_only_through_aten():
    x, i = torch.arange(3.0), torch.tensor(1)
    read = torch.compile(lambda x, i: torch.ops.aten.index.Tensor(x, (i,)), fullgraph=True, backend="aot_eager")
    assert read(x, i) == 1


def test_pytorch_symbolic_sizes_become_ints_when_asked():
    seen = []

    @torch.compiler.allow_in_graph
    def look(x):
        seen.append((type(x.shape[0]), int(x.shape[0])))
        return x * 2

    torch.compile(lambda x: look(x), fullgraph=True, dynamic=True, backend="aot_eager")(torch.ones(3))
    assert (torch.SymInt, 3) in seen


def test_pytorch_functional_tensors_are_known_as_such():
    seen = []
    torch.func.functionalize(lambda x: seen.append(torch._is_functional_tensor(x)) or x * 1)(torch.ones(2))
    assert seen == [True]


def test_pytorch_reads_what_a_gradient_wraps_as_a_list_only():
    def look(x):
        mask = x > 1
        with pytest.raises((RuntimeError, TypeError)):
            mask.numpy(force=True)
        assert to_list(mask) == [False, True]
        return x.sum()

    torch.func.grad(look)(torch.tensor([1.0, 2.0]))


def test_pytorch_nodes_say_what_derivatives_they_take():
    node = torch.ones(3, 2, requires_grad=True).double().sum(0).grad_fn
    assert [(list(made.shape), made.dtype) for made in node._input_metadata] == [([2], torch.float64)]
    assert [following.name() for following, _ in node.next_functions] == ["ToCopyBackward0"]


def test_pytorch_maps_over_a_reverse_sweep():
    x = torch.arange(3.0, requires_grad=True)
    y = x**2
    rows = torch.func.vmap(lambda seed: torch.autograd.grad(y, x, seed, retain_graph=True)[0])(torch.eye(3))
    assert rows.diagonal().tolist() == [0, 2, 4]


def test_pytorch_draws_the_same_mask_alone_and_in_a_stack():
    state = torch.get_rng_state()
    alone = torch.dropout(torch.ones(64), 0.5, train=True)
    torch.set_rng_state(state)
    pushed = torch.func.vmap(
        lambda seed: torch.func.jvp(lambda x: torch.dropout(x, 0.5, train=True), (torch.ones(64),), (seed,))[1],
        randomness="same",
    )(torch.eye(64))
    assert pushed.diagonal().tolist() == alone.tolist()


def test_pytorch_tells_a_compiled_region_by_its_frame_callback():
    seen = []

    @torch.compiler.disable
    def look():
        seen.append(get_eval_frame_callback())

    def outer(x):
        look()
        return x + 1

    look()
    torch.compile(outer, backend="aot_eager")(torch.ones(2))
    assert seen == [None, None]
    assert get_eval_frame_callback() is None


@pytest.mark.skipif(APPLY_IS_IN_C, reason="PyTorch applies functions in C since 2.15: the next test")
def test_pytorch_finds_the_apply_of_a_function_in_its_base_class_even_if_it_was_bound_before():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

    from torch.autograd.function import _SingleLevelFunction

    bound, seen = Twice.apply, []

    def apply(cls, *args):
        seen.append(cls)
        return super(_SingleLevelFunction, cls).apply(*args)

    _SingleLevelFunction.apply = classmethod(apply)
    try:
        assert bound(torch.ones(1)).item() == 2
    finally:
        del _SingleLevelFunction.apply
    assert seen == [Twice]
    assert bound(torch.ones(1)).item() == 2


@pytest.mark.skipif(not APPLY_IS_IN_C, reason="PyTorch applies functions in Python before 2.15: the last test")
@pytest.mark.parametrize("has_setup", [False, True])
def test_pytorch_looks_up_the_parts_of_a_function_in_its_class_even_if_apply_was_bound_before(monkeypatch, has_setup):
    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

    class WithSetup(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return 2 * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

    kind, seen = WithSetup if has_setup else Plain, []
    bound = kind.apply
    bound(torch.ones(1))

    def look_up(cls, name):
        seen.append(name)
        return type.__getattribute__(cls, name)

    bind = autograd_function._bind_default_args
    monkeypatch.setattr(FunctionMeta, "__getattribute__", look_up, raising=False)
    monkeypatch.setattr(autograd_function, "_bind_default_args", lambda *args: seen.append("bind") or bind(*args))
    assert bound(torch.ones(1)).item() == 2
    monkeypatch.undo()
    parts = [name for name in seen if name in ("setup_context", "forward", "bind", "_backward_cls")]
    binds, ends = (["forward", "bind"], ["setup_context"]) if has_setup else ([], [])
    assert parts == ["setup_context", *binds, "_backward_cls", "forward", *ends]


def test_pytorch_lets_a_function_return_an_alias_that_may_be_written_to():
    class Alias(torch.autograd.Function):
        @staticmethod
        def forward(ctx, anchor, x):
            return x.detach()

        @staticmethod
        def backward(ctx, upstream):
            return None, None

    x = torch.tensor([1.0, 2.0])
    alias = Alias.apply(torch.zeros((), requires_grad=True), x)
    edge = torch.autograd.graph.get_gradient_edge(alias)
    alias[0] = alias[1] * 3
    assert x.tolist() == [6, 2]
    assert alias._version == x._version == 1
    after = torch.autograd.graph.get_gradient_edge(alias)
    (gradient,) = torch.autograd.grad([after], [edge], [torch.ones(2)])
    assert gradient.tolist() == [0, 4]


def test_pytorch_counts_operations_and_nodes_keep_notes():
    x = torch.ones(2, requires_grad=True)
    start = torch.autograd._get_sequence_nr()
    y = x * 2
    assert start <= y.grad_fn._sequence_nr() < torch.autograd._get_sequence_nr()
    y.grad_fn.metadata["note"] = 1
    assert y.grad_fn.metadata["note"] == 1
    assert (y[-1].grad_fn._saved_index, y[:-1].grad_fn._saved_end) == (2**64 - 1, 2**64 - 1)


def test_pytorch_transforms_take_hold_of_their_arguments_by_two_wrappers(monkeypatch):
    import torch._functorch.eager_transforms
    import torch._functorch.vmap

    seen = []
    for home, name in (
        (torch._functorch.vmap, "_add_batch_dim"),
        (torch._functorch.eager_transforms, "_wrap_for_grad"),
    ):
        original = getattr(home, name)

        def wrap(x, *args, original=original, name=name):
            seen.append((name, tuple(x.shape)))
            return original(x, *args)

        monkeypatch.setattr(home, name, wrap)
    x = torch.ones(2, 3)
    torch.func.vmap(lambda row: row.sum())(x)
    assert seen == [("_add_batch_dim", (2, 3))]
    torch.func.grad(lambda x: x.sum())(x)
    assert seen[1:] == [("_wrap_for_grad", (2, 3))]
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        seen.clear()
        transform(lambda x: x.sum())(x)
        assert ("_wrap_for_grad", (2, 3)) in seen


def test_pytorch_uses_the_innermost_saved_tensor_hooks_alone():
    autograd, seen = torch._C._autograd, []
    assert not autograd._top_saved_tensors_default_hooks(False)
    assert autograd._saved_tensors_hooks_get_disabled_error_message() is None
    outer, inner = [lambda x, name=name: seen.append(name) or x for name in ("outer", "inner")]
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(outer, outer), torch.autograd.graph.saved_tensors_hooks(inner, inner):
        assert tuple(autograd._top_saved_tensors_default_hooks(False)) == (inner, inner)
        (x**2).sum()
    assert set(seen) == {"inner"}
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        assert autograd._saved_tensors_hooks_get_disabled_error_message() == "none here"
    assert not torch._C._are_functorch_transforms_active()
    torch.func.grad(lambda x: seen.append(torch._C._are_functorch_transforms_active()) or x.sum())(x)
    assert seen[-1] is True


def test_pytorch_does_not_reuse_the_key_of_a_live_storage():
    x = torch.ones(5)
    key, reference = x.untyped_storage()._cdata, StorageWeakRef(x.untyped_storage())
    assert x[2:].detach().untyped_storage()._cdata == key
    assert not reference.expired()
    del x
    assert reference.expired()
    others = [torch.ones(5) for _ in range(1000)]
    assert key not in {other.untyped_storage()._cdata for other in others}


def test_pytorch_asks_a_dispatch_mode_whether_the_compiler_is_to_stay_away():
    from torch.utils._python_dispatch import TorchDispatchMode

    asked = getattr(TorchDispatchMode, "_should_skip_dynamo", bool)  # older versions ask no mode
    assert asked() in (True, False)


def test_pytorch_nodes_keep_what_says_which_elements_they_took():
    x = torch.ones(4, 3, requires_grad=True)
    select, part, index = x[:, 1].grad_fn, x[1:3].grad_fn, x[torch.tensor([0, 2])].grad_fn
    assert (select.name(), select._saved_dim, select._saved_index) == ("SelectBackward0", 1, 1)
    assert part.name() == "SliceBackward0"
    assert (part._saved_dim, part._saved_start, part._saved_end, part._saved_step) == (0, 1, 3, 1)
    assert index.name() == "IndexBackward0"
    assert index._saved_indices[0].tolist() == [0, 2]


def test_pytorch_nodes_of_a_users_function_say_which():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, upstream):
            return 2 * upstream

    node = Twice.apply(torch.ones(1, requires_grad=True)).grad_fn
    assert node._forward_cls is Twice
    assert isinstance(node, torch._C._FunctionBase)
    assert not hasattr(torch.ones(1, requires_grad=True).exp().grad_fn, "_forward_cls")


@pytest.mark.parametrize(
    ("name", "reentrant"), [(REENTRANT_CHECKPOINT, True), (other_checkpoint(torch.utils.checkpoint), False)]
)
def test_pytorch_checkpoints_look_up_what_they_run_by(monkeypatch, name, reentrant):
    import torch.utils.checkpoint as module

    original, seen = getattr(module, name), []

    class Spy:
        @staticmethod
        def apply(function, preserve, *arguments):
            seen.append(name)
            return original.apply(function, preserve, *arguments)

    def generator(*arguments, **options):
        seen.append(name)
        return original(*arguments, **options)

    monkeypatch.setattr(module, name, Spy if reentrant else generator)
    x = torch.ones(2, requires_grad=True)
    module.checkpoint(torch.sin, x, use_reentrant=reentrant).sum().backward()
    assert seen == [name]
    assert x.grad is not None


def test_pytorch_applies_hooks_of_a_tensor_before_its_gradient_is_handed_out():
    x = torch.ones(2, requires_grad=True)
    y = x * 1
    y.register_hook(lambda gradient: gradient * 10)
    (gradient,) = torch.autograd.grad((y * 3).sum(), [torch.autograd.graph.get_gradient_edge(y)])
    assert gradient.tolist() == [30, 30]


def test_a_gradient_may_be_taken_when_it_is_whole_from_a_leaf_that_shares_the_memory_of_a_parameter():
    parameter, other = torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    parameter.register_post_accumulate_grad_hook(lambda p: pytest.fail("the hook of the parameter ran"))
    leaf = parameter.detach().requires_grad_()
    taken = []

    def take(leaf):
        taken.append(leaf.grad.tolist())
        leaf.grad = None

    leaf.register_post_accumulate_grad_hook(take)
    losses = [(leaf * 2).sum(), (leaf * 3 * other).sum()]
    with torch.autograd.set_multithreading_enabled(False):
        torch.autograd.backward(losses, [torch.ones(()), torch.ones(())], inputs=[leaf])
    assert taken == [[5.0, 5.0]]  # once, for all losses
    assert leaf.grad is parameter.grad is other.grad is None
    with torch.no_grad():
        leaf += 1
    assert parameter.tolist() == [2.0, 2.0]
    assert parameter._version == leaf._version == 1


def test_the_leaves_of_a_graph_are_found_by_walking_it():
    x = torch.ones(2, requires_grad=True)
    (end, _), _ = (x * 2).grad_fn.next_functions
    assert end.variable is x


def test_pytorch_calls_global_hooks_also_when_added_during_a_call():
    from torch.nn.modules.module import _global_forward_pre_hooks, register_module_forward_hook

    seen, later = [], []

    def before(module, arguments):
        seen.append("before")
        later.append(register_module_forward_hook(lambda *_: seen.append("after"), always_call=True))

    _global_forward_pre_hooks[-1] = before
    try:
        torch.nn.Tanh()(torch.ones(2))
    finally:
        del _global_forward_pre_hooks[-1]
        for hook in later:
            hook.remove()
    assert seen == ["before", "after"]


def test_pytorch_stacks_by_steps_as_vmap_does():
    from elementgrad._backends.torch.autodiff import batched_vjp

    x, other = torch.arange(3.0).requires_grad_(), torch.ones(2, requires_grad=True)
    y = torch.sin(x) * x.sum()

    def sweep(seed):
        return torch.autograd.grad(y, [x, other], seed, retain_graph=True, allow_unused=True)

    seeds = torch.eye(3)
    rows, nothing = batched_vjp(sweep, seeds)
    assert nothing is None
    torch.testing.assert_close(rows, torch.func.vmap(lambda seed: sweep(seed)[0])(seeds))
    (same,) = batched_vjp(lambda seed: [torch.ones(2)], seeds)  # what does not depend on the seed is repeated
    assert same.shape == (3, 2)
    with pytest.raises(RuntimeError, match="random"):
        batched_vjp(lambda seed: [torch.rand_like(seed)], seeds)
    assert torch._C._functorch.maybe_current_level() is None
    with pytest.raises(RuntimeError, match="saved tensor hooks"), torch.autograd.graph.save_on_cpu():
        batched_vjp(sweep, seeds)


def test_a_leaf_is_known_by_the_last_node_of_pytorch_before_it():
    x = torch.ones(2, requires_grad=True)
    ((node, _),) = x.clone().grad_fn.next_functions
    assert node.variable is x
    assert node.next_functions == ()


def test_pytorch_has_an_engine_that_gives_gradients_and_keeps_none():
    from torch.autograd.graph import _engine_run_backward

    x, unused = torch.tensor([1.0, 2.0], requires_grad=True), torch.ones(1, requires_grad=True)
    y = x.square().sum()
    to_inputs = {"allow_unreachable": True, "accumulate_grad": False}
    for _ in range(2):
        given = _engine_run_backward((y,), (torch.ones(()),), True, False, (x, unused), **to_inputs)
        assert given[0].tolist() == [2.0, 4.0]
        assert given[1] is None
    assert x.grad is None


def test_pytorch_draws_random_numbers_in_no_other_module_of_the_still_kinds():
    drawing = {getattr(torch.nn, name) for name in DRAWING}
    signs = re.compile(r"dropout|self\.training|_random_samples|bernoulli|rrelu\(")
    kinds = (STATELESS | drawing) - {torch.nn.Module}
    assert {kind for kind in kinds if signs.search(inspect.getsource(kind))} == drawing


def test_a_wrapper_that_reduces_gradients_is_known_in_its_forward_and_keeps_the_parameters_it_met():
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    model = torch.nn.Linear(2, 2)
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append(DistributedDataParallel._active_ddp_module))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapper = DistributedDataParallel(model)
        wrapper(torch.ones(1, 2))
        model(torch.ones(1, 2))
    finally:
        distributed.destroy_process_group()
    assert seen == [wrapper, None]
    assert [id(parameter) for parameter in wrapper._module_parameters] == [id(held) for held in model.parameters()]


def test_pytorch_goes_through_hooks_on_all_optimizers_and_modules_in_functions_known_by_name():
    from torch.nn.modules.module import register_module_module_registration_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from elementgrad._backends.torch.train.parameter import _calls_hooks

    seen = []

    def look(*_):
        seen.append(_calls_hooks(sys._getframe()))

    registers = register_module_module_registration_hook, register_optimizer_step_pre_hook
    handles = [register(look) for register in (*registers, register_optimizer_step_post_hook)]
    try:
        model = torch.nn.Module()
        model.inner = torch.nn.Linear(2, 1)
        model.add_module("other", torch.nn.Linear(2, 1))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [True] * 4
    assert not _calls_hooks(sys._getframe())


def test_a_storage_tells_how_many_tensors_hold_it_and_zeros_have_none():
    def uses(x):
        storage = x.untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata)

    x = torch.ones(3)
    assert uses(x) == 2
    y = x.detach()
    assert uses(x) == 3
    view = y[1:]
    del x, y
    assert uses(view) == 3  # and the tensor that it is a view of
    view = view.detach()
    assert uses(view) == 2
    zeros = torch._efficientzerotensor(3)
    assert zeros._is_zerotensor()
    assert not zeros.clone()._is_zerotensor()
    (wrapped,) = torch.func.vmap(lambda x: (x + is_functorch_wrapped_tensor(x),))(torch.zeros(1))
    assert wrapped.tolist() == [1]
    assert not is_functorch_wrapped_tensor(torch.ones(3))


def test_a_scaler_keeps_the_stage_of_each_optimizer_until_its_update():
    model = torch.nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    before = copy.deepcopy(_compat.optimizer_stages(scaler))
    assert not before
    scaler.unscale_(optimizer)
    assert id(optimizer) in _compat.optimizer_stages(scaler)
    _compat.set_optimizer_stages(scaler, before)
    scaler.unscale_(optimizer)


def test_pytorch_calls_hooks_on_all_optimizers_before_any_of_them_steps():
    seen = []
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    hooks = _compat.all_optimizers_hooks()
    hooks[-1] = lambda one, args, kwargs: seen.append((one, p.detach().clone()))
    try:
        p.grad = torch.ones(2)
        optimizer.step()
    finally:
        del hooks[-1]
    ((one, before),) = seen
    assert one is optimizer
    assert before.tolist() == [1, 1]
