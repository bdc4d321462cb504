"""`eg.field`: the elements that named elements depend on, or can reach, as a place; without a sweep."""

from collections.abc import Callable, Mapping
from typing import Any

from elementgrad._backends.registry import not_compiled
from elementgrad._backends.source_location import spelled_as
from elementgrad._cone.boxes import Box
from elementgrad._cone.plan import empty, plan_need, plan_reach
from elementgrad._names import pytree
from elementgrad._names.arguments import NOTHING, gather_arguments
from elementgrad._names.call import ONLY_OUTPUT, BoundCall, TensorRef
from elementgrad._names.names import expand_patterns
from elementgrad._place.place import Place, at, parse_place, parse_target
from elementgrad._read.cone import box_of, record
from elementgrad.errors import OptionError


@not_compiled
@spelled_as("eg.field")
def field(
    f: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] = NOTHING,
    of: Any = None,
    wrt: Any = None,
    names_from: Any = None,
    **arguments: Any,
) -> Any:
    """Return the receptive field of elements of `of`, or the projective field of elements of `wrt`.

    It is found from the operations of `f` and their shapes, and nothing is computed. It is the smallest box that holds
    all elements the named ones can depend on, whatever the numbers are.

    Args:
        f: A function or model, as for `jacobian`.
        args: The positional arguments of `f`.
        kwargs: The keyword arguments of `f`.
        of: An output, activation or tag. With an index, as in `"conv6[0, 3, 250, 250]"`, the field is a place of `wrt`.
        wrt: An input, parameter, activation or tag. With an index the field is a place of `of`.
        names_from: As for `jacobian`.
        arguments: More keyword arguments of `f`.

    Returns:
        The field as a place, without elements if there are none; for a pattern, such as `of="conv*[0, 0, 5, 5]"`, a
        dict of them by the places that it matches.

    Raises:
        OptionError: Both `of` and `wrt` have an index, or neither has.
        FrameworkError: The function cannot be recorded.

    >>> import torch, elementgrad as eg
    >>> model = torch.nn.Sequential(torch.nn.Conv1d(1, 1, 3), torch.nn.MaxPool1d(2))
    >>> print(eg.field(model, torch.ones(1, 1, 100), of="output[0, 0, 10]", wrt="input"))
    input[0:1, 0:1, 20:24] (input)
    >>> print(eg.field(model, torch.ones(1, 1, 100), of="output", wrt="input[0, 0, 50]"))
    output[0:1, 0:1, 24:26] (output)
    """
    f, args, kwargs = gather_arguments(field, f, args, kwargs, arguments, names_from)
    target, source = parse_target(of), parse_place(wrt)
    if bool(target.index) == bool(source.index):
        raise OptionError(
            "a field is computed for the elements of one side, and is a place of the other; give an index to exactly "
            "one of of and wrt"
        )
    call = BoundCall(f, args, kwargs)
    targets, sources = expand_patterns(call, target, source)
    return pytree.map_tree(targets, lambda each: pytree.map_tree(sources, lambda other: _field(call, each, other)))


def _field(call: BoundCall, target: Place, source: Place) -> Place:
    refs = call.find_target(target), call.find_source(source)
    linear = record(call, [refs[1]], [refs[0]], required=True)
    assert linear is not None
    program = linear.program
    y, x = program.outputs[0], program.inputs[0]
    if target.index:
        found = plan_need(program.ops, y, box_of(target.select(y.shape), y.shape)).needed.get(x)
        return _place(call, refs[1], empty(x.shape) if found is None else found)
    reached = plan_reach(program.ops, x, box_of(source.select(x.shape), x.shape)).get(y)
    return _place(call, refs[0], empty(y.shape) if reached is None else reached)


def _place(call: BoundCall, ref: TensorRef, box: Box) -> Place:
    name = call.output_name if ref is ONLY_OUTPUT else ref.name
    return at(name, kind=ref.kind)[tuple([slice(*interval) for interval in box])]
