"""Calls that every framework refuses, and those that need none: name, (call of the framework, error, text).

In the text, `{fw}` stands for the framework, `{other}` for the next one and `{both}` for the two of them.
"""

import numpy as np

import elementgrad as eg
from tests.refusals.row import never
from tests.support.frameworks import FRAMEWORKS, TENSORFLOW, TORCH

A, B = np.array([1.0, 2.0, 3.0]), np.array([10.0, 20.0, 30.0])
X = np.array([[0.1, 0.2, 0.3], [0.7, -0.4, 0.9]])
BAND = np.array([[1, 1, 0], [0, 1, 1], [0, 0, 1]])
RING = dict(zip(FRAMEWORKS, FRAMEWORKS[1:] + FRAMEWORKS[:1], strict=True))
"""To each framework another one."""


def at(fw, values, dtype="float64"):
    return eg.at(fw.tensor(values, dtype))


def edits():
    yield (
        "choose, logits of more axes",
        (
            lambda fw: eg.choose(fw.tensor(X)[0], fw.tensor(X)),
            eg.BroadcastError,
            r"logits of shape \(2, 3\) do not fit x of shape \(3,\) along axis 0",
        ),
    )
    yield (
        "choose, logits of another size",
        (
            lambda fw: eg.choose(fw.tensor(X), fw.tensor(X)[:, 0]),
            eg.BroadcastError,
            r"logits of shape \(2,\) do not fit x of shape \(2, 3\) along axis 1",
        ),
    )
    yield (
        "choose, no such axis",
        (
            lambda fw: eg.choose(fw.tensor(X), fw.tensor(X), axis=2),
            eg.SelectionError,
            "axis 2 is out of range for a tensor of 2 axes",
        ),
    )
    yield (
        "choose, no axis at all",
        (
            lambda fw: eg.choose(fw.tensor(1.0), fw.tensor(X)),
            eg.SelectionError,
            "axis -1 is out of range for a tensor of 0 axes",
        ),
    )
    yield (
        "choose, whole numbers as logits",
        (
            lambda fw: eg.choose(fw.tensor(X), fw.tensor([1, 2, 3], "int32")),
            eg.DtypeError,
            "choose is about gradients",
        ),
    )
    yield (
        "choose, whole numbers",
        (
            lambda fw: eg.choose(fw.tensor([1, 2, 3], "int32"), fw.tensor(X)[0]),
            eg.DtypeError,
            "choose is about gradients",
        ),
    )
    yield (
        "choose, complex logits",
        (
            lambda fw: eg.choose(fw.tensor(X), fw.tensor([1, 2, 3], "complex64")),
            eg.DtypeError,
            "logits must be real",
        ),
    )
    yield (
        "choose, nothing",
        (
            lambda fw: eg.choose(fw.tensor([]), fw.tensor([])),
            eg.SelectionError,
            "axis 0 of x is empty, and nothing can be chosen from it",
        ),
    )
    yield "choose, an array as logits", (lambda fw: eg.choose(fw.tensor(X), X), eg.FrameworkError, "give logits of")
    yield (
        "choose, logits of another framework",
        (
            lambda fw: eg.choose(fw.tensor(X), RING[fw].tensor(X)),
            eg.FrameworkError,
            "x is {fw}'s and logits are",
        ),
    )
    yield (
        "a list of tensors as value",
        (
            lambda fw: at(fw, [1.0, 2.0])[:].set([fw.tensor(1.0), fw.tensor(1.0)]),
            eg.FrameworkError,
            "a list of tensors is not one value; stack them into a tensor first",
        ),
    )
    yield (
        "a list of tensors as index",
        (
            lambda fw: at(fw, [1.0, 2.0])[[fw.tensor(0, "int64"), fw.tensor(0, "int64")]],
            eg.SelectionError,
            "a list of tensors is not an index; stack them into one tensor first",
        ),
    )
    for verb in ("only", "stop"):
        for dtype in ("int32", "bool"):
            yield (
                f"{verb}, {dtype}",
                (
                    lambda fw, verb=verb, dtype=dtype: getattr(at(fw, [1, 0], dtype)[0], verb)(),
                    eg.DtypeError,
                    f"{verb} is about gradients and .*{dtype}.* has none; give a floating",
                ),
            )
    wide = [("int32", 2.5), ("int64", 2.0), ("float32", 1j), ("int32", np.array([0.5])), ("float64", np.array([1j]))]
    for verb in ("set", "add", "multiply"):
        for dtype, value in wide:
            yield (
                f"{verb} {value} in {dtype}",
                (
                    lambda fw, verb=verb, dtype=dtype, value=value: getattr(at(fw, [1, 0], dtype)[0], verb)(value),
                    eg.DtypeError,
                    r"value does not fit a tensor of .*; cast one of them first",
                ),
            )
    for verb in ("add", "multiply"):
        yield (
            f"{verb}, booleans",
            (
                lambda fw, verb=verb: getattr(at(fw, [True, False], "bool")[0], verb)(True),
                eg.DtypeError,
                r"add and multiply need numbers and the tensor is .*bool",
            ),
        )
    for value in ("1", None, {}, [1.0, "a"], [[1.0], [2.0, 3.0]]):
        yield (
            f"set {value!r}",
            (
                lambda fw, value=value: at(fw, [1.0])[0].set(value),
                eg.FrameworkError,
                "is not a value to put into a tensor; give a number, array or tensor",
            ),
        )
    yield (
        "a value of another framework",
        (
            lambda fw: at(fw, [1.0])[0].set(RING[fw].tensor(1.0)),
            eg.FrameworkError,
            "the tensor is {fw}'s and the value is {other}'s",
        ),
    )
    yield (
        "an index of another framework",
        (
            lambda fw: at(fw, [1.0])[RING[fw].tensor([0], "int64")].get(),
            eg.FrameworkError,
            "the tensor is {fw}'s and the index is {other}'s",
        ),
    )
    for dtype in ("float64", "complex64"):
        yield (
            f"an index of {dtype}",
            (
                lambda fw, dtype=dtype: at(fw, [1.0])[fw.tensor([0.0], dtype)],
                eg.SelectionError,
                f"dtype .*{dtype}.* cannot name elements",
            ),
        )
    for name in ("", 3, None, "a#0", "a:b", "a[0]", "a(b)", "a\nb"):
        yield (
            f"tag {name!r}",
            (
                lambda fw, name=name: eg.tag(fw.tensor(A), name),
                eg.PlaceError,
                "is not a name for a tag; give a str without",
            ),
        )
    yield (
        "an index twice",
        (
            lambda fw: at(fw, [[1.0]])[1][0],
            eg.PlaceError,
            r"tensor\[1\] is indexed already; write one index with commas",
        ),
    )


def names():
    wrong = {
        "weigth": "no tensor is named 'weigth'; nearest: weight$",
        "p": "no tensor is named 'p'; nearest: p.a, p.b$",
        "nothing like it": "no tensor is named 'nothing like it'; there are: weight, p.a, p.b, output$",
        "output.loss": "no output is named 'output.loss'; nearest: output$",
        eg.at("output", kind="input"): "no input is named 'output'; there are: weight, p.a, p.b$",
    }
    for wrt, text in wrong.items():
        yield (
            f"wrt={wrt}",
            (
                lambda fw, wrt=wrt: eg.grad(
                    lambda weight, p: fw.sum(weight), fw.tensor(A), {"a": fw.tensor(A), "b": fw.tensor(B)}, wrt=wrt
                ),
                eg.PlaceError,
                text,
            ),
        )
    for wrt in ("p", eg.at("output", kind="input"), eg.at("x", kind="parameter")):
        yield (
            f"wrt={wrt} before any work",
            (
                lambda fw, wrt=wrt: eg.grad(lambda p: never(p), {"a": fw.tensor(A)}, wrt=wrt),
                eg.PlaceError,
                "is named",
            ),
        )
    outputs = {
        "output.los": "no output is named 'output.los'; nearest: output.loss, output.logits",
        "output": "'output' is 2 tensors here; name one: output.loss, output.logits",
        eg.at("output.loss", kind="parameter"): "no parameter is named 'output.loss'; there are: x",
    }
    for of, text in outputs.items():
        yield (
            f"of={of}",
            (
                lambda fw, of=of: eg.grad(lambda x: {"loss": fw.sum(x), "logits": x}, fw.tensor(A), of=of),
                eg.PlaceError,
                text,
            ),
        )
    for option in ({"wrt": "x[1"}, {"of": "output[import os]"}):
        yield (
            f"{option} before any work",
            (
                lambda fw, option=option: eg.jacobian(never, fw.tensor(A), **option),
                eg.ParseError,
                "at character",
            ),
        )
    yield (
        "a gradient of whole numbers",
        (
            lambda fw: eg.grad(lambda x, i: fw.sum(x), fw.tensor(A), fw.tensor([1, 2], "int32"), wrt="i"),
            eg.DtypeError,
            r"i is of dtype .*int32.*, which has no gradients; make it floating point",
        ),
    )
    yield (
        "whole numbers as output",
        (
            lambda fw: eg.jacobian(
                lambda x, i: (x, i * 2), fw.tensor(A), fw.tensor([1, 2], "int32"), of="output.1", wrt="x"
            ),
            eg.DtypeError,
            r"output.1 is of dtype .*int32.*, which has no gradients",
        ),
    )
    for returned in (None, 3.0, A, "text", [], {"loss": 1.0}):
        kind = type(returned).__name__
        yield (
            f"a function that returns {kind}",
            (
                lambda fw, returned=returned: eg.jacobian(lambda x: returned, fw.tensor(A)),
                eg.FrameworkError,
                f"the function returned {kind} and no tensor; return a tensor",
            ),
        )
    yield (
        "a tensor as function",
        (
            lambda fw: eg.grad(fw.tensor(A), lambda x: x),
            eg.FrameworkError,
            "cannot be called; give a function and then its arguments",
        ),
    )
    yield (
        "tensors of two frameworks",
        (
            lambda fw: eg.grad(lambda x, y: x, fw.tensor(A), RING[fw].tensor(B), wrt="x"),
            eg.FrameworkError,
            "tensors of {both}; use one framework for all",
        ),
    )
    yield (
        "a function of two frameworks",
        (
            lambda fw: eg.jacobian(lambda x: RING[fw].tensor(B), fw.tensor(A)),
            eg.FrameworkError,
            "framework",
        ),
    )
    yield (
        "an argument too few",
        (
            lambda fw: eg.grad(lambda x, y: x, fw.tensor(A)),
            TypeError,
            "missing a required argument: 'y'",
        ),
    )
    yield (
        "an argument too many",
        (
            lambda fw: eg.grad(lambda x: x, fw.tensor(A), kwargs={"z": 1}),
            TypeError,
            "unexpected keyword argument 'z'",
        ),
    )


def stretched(fw):
    return lambda x: x * x * fw.sum(x)


def reads():
    yield (
        "check, whole numbers",
        (
            lambda fw: eg.check(lambda x: (x * x)[0], fw.tensor([1, 2], "int32"), wrt="x[0]"),
            eg.DtypeError,
            "x is of dtype .*int32.*, which has no gradients; make it floating point first",
        ),
    )
    indices = {
        "0, (0, 0)": ((0, (0, 0)), r"0 for output of 2 axes: write \(0, \.\.\.\) for all of that row, or one int per"),
        "(0, 0), int64": (((0, 0), np.int64(1)), r"1 for x of 2 axes: write \(1, \.\.\.\)"),
        "0": (0, r"one index: a Jacobian has two sides, J\[out, in\]"),
        ":": (slice(None), "one index: a Jacobian has two sides"),
        "0, 0, 0": ((0, 0, 0), "3 indices: a Jacobian has two sides"),
        "()": ((), "0 indices: a Jacobian has two sides"),
        "(0, 3), ...": (((0, 3), ...), "output: .*index 3 is out of range for axis 1 of size 3"),
        "..., (-3, 0)": ((..., (-3, 0)), "x: .*index -3 is out of range for axis 0 of size 2"),
        "..., [0, 2]": ((..., [0, 2]), "x: .*index 2 is out of range for axis 0 of size 2"),
        "(0, 0, 0), ...": (((0, 0, 0), ...), "3 indices for a tensor of 2 axes"),
        "a mask": ((np.zeros(3, bool), ...), "a mask of shape"),
        "..., None": ((..., None), "an index is made of"),
        "..., 1.0": ((..., 1.0), "an index is made of"),
        "..., 'x'": ((..., "x"), "an index is made of"),
    }
    for name, (index, text) in indices.items():
        yield (
            f"J[{name}]",
            (
                lambda fw, index=index: eg.jacobian(stretched(fw), fw.tensor(X))[index],
                IndexError,
                text,
            ),
        )
    yield (
        "J @ a factor of another shape",
        (
            lambda fw: eg.jacobian(stretched(fw), fw.tensor(X)) @ fw.tensor(A),
            eg.BroadcastError,
            r"a factor of shape \(3,\) against x of shape \(2, 3\); give the same shape, with more axes behind it",
        ),
    )
    yield (
        "an array of another shape @ J",
        (
            lambda fw: np.ones((2, 3, 4)) @ eg.jacobian(stretched(fw), fw.tensor(X)),
            eg.BroadcastError,
            r"against output of shape .* more axes before it",
        ),
    )
    yield (
        "J @ a tensor of another framework",
        (
            lambda fw: eg.jacobian(stretched(fw), fw.tensor(X)) @ (TENSORFLOW if fw is TORCH else TORCH).tensor(X),
            eg.FrameworkError,
            "the Jacobian is {fw}'s and the other factor is not",
        ),
    )
    factors = {
        "tensor": lambda fw: fw.tensor([1j], "complex128"),
        "array": lambda fw: np.array([1j]),
        "list": lambda fw: [1j],
    }
    for name, factor in factors.items():
        yield (
            f"J @ a complex {name}",
            (
                lambda fw, factor=factor: eg.jacobian(lambda x: x**2, fw.tensor([2.0])) @ factor(fw),
                eg.DtypeError,
                "a complex factor for x, which is real",
            ),
        )
    for factor in (None, "a", object()):
        yield (
            f"J @ {type(factor).__name__}",
            (
                lambda fw, factor=factor: eg.jacobian(lambda x: x**2, fw.tensor([2.0])) @ factor,
                eg.DtypeError,
                "is not a factor for x; give a tensor of its shape",
            ),
        )
    yield (
        "J @ J",
        (
            lambda fw: (lambda J: J @ J)(eg.jacobian(lambda x: x**2, fw.tensor([2.0]))),
            eg.FrameworkError,
            "two Jacobians are not multiplied",
        ),
    )


def square(fw, call):
    x = fw.tensor(np.ones(4))
    return call(eg.jacobian(lambda x: x * x, x, pattern=eg.Pattern.from_dense(np.eye(4))), x)


def patterns():
    rows = {
        "format": (lambda J, x: J.sparse("dense"), eg.OptionError, 'format=\'dense\' is none of "csr", "coo" and "sc'),
        "local": (lambda J, x: J.pattern(local=1), eg.OptionError, "local=1 is neither True nor False"),
        "another x": (lambda J, x: J.prepare()(x[1:]), eg.BroadcastError, r"\(3,\).* prepared for x of shape \(4,\)"),
        "an array": (lambda J, x: J.prepare()(np.ones(4)), eg.FrameworkError, r"S\(x\) takes a tensor of"),
        "another shape": (
            lambda J, x: eg.jacobian(lambda x: x, x, pattern=eg.Pattern.from_dense(np.eye(3))),
            eg.OptionError,
            r"the pattern is of shape \(3, 3\), and output with respect to x is \(4, 4\)",
        ),
        "no pattern": (
            lambda J, x: eg.jacobian(lambda x: x, x, pattern=3),
            eg.OptionError,
            "pattern is int; give an eg.Pattern",
        ),
        "examples": (
            lambda J, x: eg.jacobian(lambda x: x, x, batch=True).sparse(),
            eg.OptionError,
            "leave it out for a sparse",
        ),
    }
    for name, (call, error, text) in rows.items():
        yield f"sparse, {name}", (lambda fw, call=call: square(fw, call), error, text)
    yield (
        "a pattern that misses an entry",
        (
            lambda fw: eg.jacobian(
                lambda x: x[1:] * x[:-1], fw.tensor(np.arange(1.0, 8.0)), pattern=eg.Pattern.from_dense(np.eye(6, 7))
            ).verify(),
            eg.PatternError,
            r"element 1 of x has entries outside the pattern.*P \| Q",
        ),
    )


EVERYWHERE = dict([*edits(), *names(), *reads(), *patterns()])


def without_a_framework():
    yield (
        "brackets without end",
        (
            lambda: eg.at("x[" + "[" * 5000),
            eg.ParseError,
            "expected fewer brackets inside one another",
        ),
    )
    yield "no text", (lambda: eg.Place.parse(None), eg.PlaceError, "NoneType is not the text of a place")
    yield (
        "a place far out",
        (
            lambda: eg.at("embedding.weight")[0, 812].select(shape=(100, 768)),
            eg.SelectionError,
            r"^embedding.weight\[0, 812\]: index 812 is out of range for axis 1 of size",
        ),
    )
    for place in (eg.at("fc.weight")[0], eg.at[0]):
        for verb in ("get", "only", "stop", "select", "set", "add", "multiply", "apply"):
            yield (
                f"{verb} of {place}",
                (
                    lambda place=place, verb=verb: getattr(place, verb)(
                        *([1.0] if verb in "set add multiply apply" else [])
                    ),
                    eg.PlaceError,
                    f"has no live tensor to {verb}; give the tensor itself",
                ),
            )
    for value in (np.ones(3), np.float64(1), [1.0], 1.0, None, {"a": 1}):
        yield (
            f"at({value!r})",
            (
                lambda value=value: eg.at(value),
                eg.FrameworkError,
                r"give a torch.Tensor, tf.Tensor, tf.Variable or jax.Array",
            ),
        )
    for shape in (5, "ab", (-1,), (5.0,)):
        yield (
            f"shape {shape!r}",
            (
                lambda shape=shape: eg.Selection.resolve(0, shape),
                eg.SelectionError,
                "is not a shape; give a tuple of sizes",
            ),
        )
    arguments = {
        "array": ((A,), "a NumPy array carries no gradients; give a torch.Tensor, tf.Tensor, tf.Variable or jax.Array"),
        "dict of arrays": (({"a": A},), "^a NumPy array carries no gradients; give a torch.Tensor"),
        "float": ((1.0,), "float is not a tensor; give a torch.Tensor"),
        "list": (([1.0, 2.0],), "list is not a tensor; give a torch.Tensor"),
        "nothing": ((), "NoneType is not a tensor; give a torch.Tensor"),
    }
    for name, (args, text) in arguments.items():
        yield f"grad of {name}", (lambda args=args: eg.grad(lambda *xs: xs[0], *args), eg.FrameworkError, text)
    yield "tag an array", (lambda: eg.tag(A, "x"), eg.FrameworkError, "a NumPy array carries no gradients")
    yield "inspect nothing", (lambda: eg.inspect(None), eg.OptionError, "NoneType is not a path; give that of the file")
    yield (
        "merge nothing",
        (lambda: eg.merge(None), eg.OptionError, "NoneType is not a list of patches; give one, as in"),
    )
    entries, pattern = eg.Pattern.from_entries, eg.Pattern
    made = {
        "2 rows and 1 columns do not pair up": lambda: entries([0, 1], [0], (2, 2)),
        "a row of an entry is no int from 0 to 1": lambda: entries([2], [0], (2, 2)),
        "a column of an entry is no int from 0 to 1": lambda: entries([0], [-1], (2, 2)),
        "and this has 1 axes; reshape it to two": lambda: pattern.from_dense(np.ones(3)),
        "starts must rise from 0 to the 2 entries": lambda: pattern((2, 2), [0, 2], [0, 1]),
        "the columns of each row must rise": lambda: pattern((1, 2), [0, 2], [1, 0]),
        r"a column is out of range for shape \(1, 2\)": lambda: pattern((1, 2), [0, 1], [2]),
        "a pattern has two axes": lambda: pattern((1, 2, 3), [0, 0], []),
        "have no union; give one shape": lambda: pattern.from_dense(BAND) | pattern.from_dense(BAND[:2]),
        "1000000000000 entries: every output depends on very many inputs": lambda: pattern.full((10**6, 10**6)),
    }
    for text, call in made.items():
        yield f"pattern, {text}", (call, eg.ElementgradError, text)


WITHOUT = dict(without_a_framework())
