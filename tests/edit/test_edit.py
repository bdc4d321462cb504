"""Edits give NumPy's values on every framework and disturb nothing."""

import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given, settings

import elementgrad as eg
from elementgrad._backends import registry as backends
from tests.support.frameworks import JAX, TENSORFLOW, TORCH
from tests.support.made import counts, edits, numpy_edit, shapes_and_indices

VERBS = ("get", "set", "add", "multiply", "apply", "only", "stop")


def run(fw, verb, x, index, value):
    place = eg.at(x)[index]
    if verb == "apply":
        return place.apply(lambda taken: taken * taken * taken)
    return getattr(place, verb)(*([] if value is None else [value]))


def test_made_indices_read_through_real_tensors(fw):
    @settings(max_examples=counts(*((60, 600) if fw is JAX else (300, 5000))))
    @given(shapes_and_indices(wrong=True, max_axes=4))
    def agrees(made):
        shape, index = made
        array = np.arange(int(np.prod(shape)), dtype=np.float64).reshape(shape)
        try:
            expected = eg.Selection.resolve(index, shape)
        except eg.SelectionError:
            with pytest.raises(eg.SelectionError):
                eg.at(fw.tensor(array))[index].get()
            return
        result = fw.numpy(eg.at(fw.tensor(array))[index].get())
        assert result.shape == expected.shape
        assert np.array_equal(result, array.reshape(-1)[expected.flat()])

    agrees()


def test_random_edits_agree_with_numpy(fw):
    @settings(max_examples=counts(*((60, 500) if fw is JAX else (200, 3000))))
    @given(edits(VERBS))
    def agrees(made):
        verb, x, index, value = made
        tensor = fw.tensor(x)
        result = run(fw, verb, tensor, index, None if value is None else fw.tensor(value))
        np.testing.assert_allclose(fw.numpy(result), numpy_edit(verb, x, index, value), rtol=1e-12)
        assert np.array_equal(fw.numpy(tensor), x)

    agrees()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_every_dtype_keeps_its_dtype(fw, verb, dtype):
    x = fw.tensor([1.0, 2.0, 3.0, 4.0], dtype)
    for index in (1, slice(None, None, -2), [3, 0], np.array([True, False, True, False])):
        result = run(fw, verb, x, index, 2.0 if verb in ("set", "add", "multiply") else None)
        assert result.dtype == x.dtype
        expected = numpy_edit(verb, np.arange(1.0, 5.0), index, 2.0)
        np.testing.assert_allclose(fw.numpy(result).astype(complex), expected)


@pytest.mark.parametrize("verb", ["get", "set", "add", "multiply", "apply"])
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_integers_are_edited_too(fw, verb, dtype):
    x = fw.tensor([1, 2, 3], dtype)
    result = run(fw, verb, x, [2, 0], 2 if verb in ("set", "add", "multiply") else None)
    assert result.dtype == x.dtype
    assert fw.numpy(result).tolist() == numpy_edit(verb, np.array([1, 2, 3]), [2, 0], 2).tolist()


def test_booleans_are_read_and_set(fw):
    x = fw.tensor([True, False, True], "bool")
    assert fw.numpy(eg.at(x)[:2].get()).tolist() == [True, False]
    assert fw.numpy(eg.at(x)[1].set(True)).tolist() == [True, True, True]
    assert fw.numpy(eg.at(x)[[0, 2]].set(False)).tolist() == [False, False, False]


def test_values_are_numbers_arrays_lists_and_tensors_of_narrower_kinds(fw):
    x = fw.tensor([1.0, 2.0, 3.0], "float32")
    for value in (
        5,
        5.0,
        True,
        np.float64(5),
        np.int64(5),
        [5.0, 6.0],
        np.array([5.0, 6.0]),
        fw.tensor([5, 6], "int32"),
    ):
        for index in (slice(0, 2), [0, 1], np.array([True, True, False])):
            expected = np.array([1.0, 2.0, 3.0])
            expected[:2] = np.asarray(value)
            for result in (eg.at(x)[index].set(value), eg.at(x)[index].apply(lambda _, value=value: value)):
                assert result.dtype == x.dtype
                assert fw.numpy(result).tolist() == expected.tolist()
            expected[:2] = np.array([1.0, 2.0]) + np.asarray(value)
            assert fw.numpy(eg.at(x)[index].add(value)).tolist() == expected.tolist()
            assert eg.at(x)[index].add(value).dtype == x.dtype


def test_a_wider_value_is_rounded_to_the_tensor(fw):
    x = fw.tensor([1.0, 2.0], "float16")
    for verb, expected in (("set", 0.1), ("add", 1.1), ("multiply", 0.1)):
        result = getattr(eg.at(x)[0], verb)(fw.tensor(0.1, "float64"))
        assert result.dtype == x.dtype
        np.testing.assert_allclose(fw.numpy(result)[0], expected, rtol=2e-3)


@pytest.mark.parametrize("value", [0.1, 1e300, 2**40, 1 / 3])
@pytest.mark.parametrize("index", [0, [0], slice(0, 1), np.array([True, False])], ids=str)
def test_numbers_keep_every_digit_of_float64(fw, value, index):
    x = fw.tensor([1.0, 2.0])
    for number in (value, np.float64(value), [value], np.array([value])):
        assert fw.numpy(eg.at(x)[index].set(number))[0] == value
        assert fw.numpy(eg.at(x)[index].add(number))[0] == 1 + value
        assert fw.numpy(eg.at(x)[index].multiply(number))[0] == value
    assert fw.numpy(eg.at(x)[[0, 0]].add(value))[0] == 1 + (value + value)


BEYOND = [
    ("uint8", 300),
    ("uint8", -1),
    ("int32", 2**40),
    ("int8", [1, 200]),
    ("float16", 70_000),
    ("float16", 1e5),
    ("float32", 1e39),
    ("float32", [1.0, -1e300]),
    ("bfloat16", 3.4e38),
    ("complex64", 1e300j),
]


@pytest.mark.parametrize(("dtype", "value"), BEYOND, ids=str)
@pytest.mark.parametrize("verb", ["set", "add", "multiply"])
def test_a_number_beyond_the_range_is_refused_in_every_form(fw, dtype, value, verb):
    x = fw.tensor([1, 2], dtype)
    for given_value in (value, np.array(value), np.array(value).tolist(), fw.tensor(value, np.array(value).dtype.name)):
        for index in (slice(None), [0, 1]):
            with pytest.raises(eg.DtypeError, match=f"does not fit {dtype}, which holds"):
                getattr(eg.at(x)[index], verb)(given_value)


def test_a_number_that_rounds_into_the_range_fits_and_so_does_infinity(fw):
    for dtype, value in (("float16", 65519.0), ("float32", 3.40282356e38)):
        x, rounded = fw.tensor([1, 2], dtype), float(np.finfo(dtype).max)
        for number in (value, rounded, -value, np.inf, -np.inf, np.nan):
            expected = np.clip(number, -rounded, rounded) if np.isfinite(number) else number
            for form in (number, [number], np.float64(number), fw.tensor(number)):
                np.testing.assert_equal(fw.numpy(eg.at(x)[0].set(form))[0], np.dtype(dtype).type(expected))
        with pytest.raises(eg.DtypeError, match=f"does not fit {dtype}"):
            eg.at(x)[0].set(rounded * 1.001)


def test_a_value_of_another_dtype_has_its_gradient(fw):
    def loss(x, value):
        return fw.sum(eg.at(eg.at(x)[0].set(value[0]))[1].multiply(value[1]))

    gradients = fw.grad(loss, fw.tensor([1.0, 2.0], "float32"), fw.tensor([3.0, 4.0]))
    assert [one.tolist() for one in gradients] == [[0, 4], [1, 2]]


def test_values_of_a_dtype_that_fits_are_not_read(fw, monkeypatch):
    backend = backends.require_backend(fw.tensor(1.0))
    for reading in ("read", "to_float64"):
        monkeypatch.setattr(type(backend), reading, None)
    for dtype, narrower in (("int64", "uint8"), ("float64", "float32"), ("float32", "int64"), ("int32", "int32")):
        assert fw.numpy(eg.at(fw.tensor([1, 2], dtype))[0].set(fw.tensor(3, narrower)))[0] == 3


def test_traced_values_are_not_read(fw):
    x = fw.tensor([1, 2], "uint8")
    assert fw.numpy(fw.jit(lambda x, value: eg.at(x)[0].set(value))(x, fw.tensor(300, "int32"))).tolist() == [44, 2]
    mapped = fw.vmap(lambda value: eg.at(x)[0].set(value))(fw.tensor([300], "int32"))
    assert fw.numpy(mapped).tolist() == [[44, 2]]


def test_values_that_torch_func_wraps_are_read():
    x = TORCH.tensor([1.0, 2.0], "float16")
    edited = torch.func.grad(lambda value: eg.at(x)[0].set(value).sum())
    assert edited(TORCH.tensor(0.75)).item() == 1
    for value in (1e5, 65520.0):
        with pytest.raises(eg.DtypeError, match="does not fit float16"):
            edited(TORCH.tensor(value))


def test_a_huge_int_is_a_float_for_a_float_tensor(fw):
    for huge in (2**64, [2**64], np.array([2**64])):
        assert fw.numpy(eg.at(fw.tensor([0.0], "float32"))[0].set(huge))[0] == 2.0**64
        with pytest.raises(eg.DtypeError, match=f"{2**64} does not fit int64"):
            eg.at(fw.tensor([0], "int64"))[0].set(huge)
    for huge in (2**3999, [2**3999]):
        with pytest.raises(eg.DtypeError, match="an int of 4000 bits does not fit"):
            eg.at(fw.tensor([0.0]))[0].set(huge)


def test_unsigned_ints_of_64_bits_are_floats_for_a_float_tensor_in_every_form(fw):
    wide = 2**63
    for value in ([wide], [[wide]], (wide,), np.array([wide]), np.array([wide], np.ulonglong), np.uint64(wide)):
        assert fw.numpy(eg.at(fw.tensor([0.0], "float32"))[:1].set(value)).tolist() == [2.0**63]
        with pytest.raises(eg.DtypeError, match=f"{wide} does not fit int64"):
            eg.at(fw.tensor([0], "int64"))[:1].set(value)


def test_an_index_of_more_digits_than_python_writes_is_out_of_range(fw):
    x, huge = fw.tensor([1.0, 2.0, 3.0]), 10**5000
    for index in (huge, -huge, (0, huge), [huge]):
        with pytest.raises(eg.SelectionError, match=r"an int of 16610 bits|holds an int that is out of range"):
            eg.at(x)[index].get()
    assert fw.numpy(eg.at(x)[:huge].get()).tolist() == [1, 2, 3]
    assert "an int of 16610 bits" in repr(eg.at(x)[huge:])
    with pytest.raises(eg.SelectionError, match="an int of 16610 bits is out of range"):
        eg.jacobian(lambda x: x, x)[huge, 0]


def test_a_step_beyond_any_size_names_the_first_element(fw):
    x = fw.tensor([1.0, 2.0, 3.0])
    for step in (10**30, -(10**30)):
        assert fw.numpy(eg.at(x)[::step].get()).tolist() == [1.0 if step > 0 else 3.0]
        assert fw.numpy(eg.at(x)[::step].set(0.0)).sum() == (5 if step > 0 else 3)


def test_values_of_number_formats_that_numpy_only_stores():
    x = JAX.tensor([0.0, 0.0], "float32")
    assert JAX.numpy(eg.at(x)[:].set(np.asarray(JAX.tensor([1.0, 2.0], "bfloat16")))).tolist() == [1, 2]
    for fw in (TORCH, TENSORFLOW, JAX):
        assert fw.numpy(eg.at(fw.tensor([0.0]))[0].set(np.longdouble(2))).tolist() == [2]
        if np.finfo(np.longdouble).max > np.finfo(np.float64).max:
            with pytest.raises(eg.DtypeError, match=r"1e\+400 does not fit float64"):
                eg.at(fw.tensor([0.0]))[0].set(np.longdouble("1e400"))


def test_unsigned_integers_take_their_whole_range(fw):
    x = fw.tensor([1, 2], "uint32")
    assert fw.numpy(eg.at(x)[0].set(3_000_000_000)).tolist() == [3_000_000_000, 2]


def test_arrays_of_any_layout_are_values(fw):
    x = fw.tensor([0.0, 0.0, 0.0])
    read_only = np.array([1.0, 2.0, 3.0])
    read_only.flags.writeable = False
    for value in (np.array([3.0, 2.0, 1.0])[::-1], np.array([1.0, 2.0, 3.0], dtype=">f8"), read_only):
        assert fw.numpy(eg.at(x)[:].set(value)).tolist() == [1, 2, 3]


def test_a_later_write_to_a_value_changes_no_gradient(fw):
    value = np.array([2.0, 2.0])

    def loss(x):
        edited = eg.at(x)[:].multiply(value)
        value[:] = 100
        return fw.sum(edited)

    assert fw.grad(loss, fw.tensor([1.0, 1.0]))[0].tolist() == [2, 2]


def test_values_broadcast_as_in_an_assignment(fw):
    x = fw.tensor(np.zeros((2, 3)))
    assert fw.numpy(eg.at(x)[:, 1:].set(fw.tensor([5.0, 6.0]))).tolist() == [[0, 5, 6], [0, 5, 6]]
    assert fw.numpy(eg.at(x)[:, 1:].set(fw.tensor([[5.0], [6.0]]))).tolist() == [[0, 5, 5], [0, 6, 6]]
    assert fw.numpy(eg.at(x)[0, 1:].set(fw.tensor([[5.0, 6.0]]))).tolist() == [[0, 5, 6], [0, 0, 0]]
    assert fw.numpy(eg.at(x)[0].add(fw.tensor([[[1.0]]]))).tolist() == [[1, 1, 1], [0, 0, 0]]


def test_repeated_elements_accumulate(fw):
    x = fw.tensor([1.0, 2.0, 3.0])
    value = fw.tensor([2.0, 3.0, 5.0, 7.0, 11.0])
    assert fw.numpy(eg.at(x)[[0, 0, 2, 0, -1]].add(value)).tolist() == [1 + 2 + 3 + 7, 2, 3 + 5 + 11]
    assert fw.numpy(eg.at(x)[[0, 0, 2, 0, -1]].multiply(value)).tolist() == [42, 2, 165]
    assert fw.numpy(eg.at(x)[[1, 1, 1]].multiply(2.0)).tolist() == [1, 16, 3]
    assert fw.numpy(eg.at(x)[[1, 1, 1]].get()).tolist() == [2, 2, 2]
    rows = fw.tensor(np.ones((2, 2)))
    assert fw.numpy(eg.at(rows)[[0, 0]].add(fw.tensor([[1.0, 2.0], [3.0, 4.0]]))).tolist() == [[5, 7], [1, 1]]


def test_a_thousand_repeats_of_one_element_are_summed_and_multiplied(fw):
    x = fw.tensor([1.0, 1.0])
    indices = np.arange(1000) % 2
    values = np.random.default_rng(0).uniform(0.99, 1.01, 1000)
    np.testing.assert_allclose(
        fw.numpy(eg.at(x)[indices].multiply(values)), [values[::2].prod(), values[1::2].prod()], rtol=1e-12
    )
    np.testing.assert_allclose(fw.numpy(eg.at(x)[indices].add(values)), [1 + values[::2].sum(), 1 + values[1::2].sum()])


@pytest.mark.parametrize("verb", ["set", "apply", "only", "stop"])
def test_repeated_elements_have_no_one_new_value(fw, verb):
    x = fw.tensor([[1.0, 2.0], [3.0, 4.0]])
    name = "apply" if verb == "apply" else verb
    with pytest.raises(eg.DuplicateError, match=rf"{name} names element \(1, 0\) more than once; name it once"):
        run(fw, verb, x, ([0, 1, -1], [0, 0, 0]), 1.0 if verb == "set" else None)


@pytest.mark.parametrize("index", [slice(0, 0), [], np.zeros((0, 2), int), np.zeros(3, bool)], ids=str)
@pytest.mark.parametrize("verb", VERBS)
def test_an_empty_selection_changes_nothing(fw, verb, index):
    x = fw.tensor([1.0, 2.0, 3.0])
    result = run(fw, verb, x, index, 7.0 if verb in ("set", "add", "multiply") else None)
    if verb == "get":
        assert fw.numpy(result).shape == np.zeros(3)[index].shape
    else:
        assert fw.numpy(result).tolist() == [1, 2, 3]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("index", [(), ..., True, np.array(True)], ids=repr)
def test_a_zero_dimensional_tensor_has_one_element(fw, verb, index):
    x = fw.tensor(3.0)
    result = run(fw, verb, x, index, 2.0 if verb in ("set", "add", "multiply") else None)
    np.testing.assert_array_equal(fw.numpy(result), numpy_edit(verb, np.array(3.0), index, 2.0))


def test_empty_tensors_have_empty_selections(fw):
    x = fw.tensor(np.zeros((0, 3)))
    assert fw.numpy(eg.at(x)[:, 1].get()).shape == (0,)
    assert fw.numpy(eg.at(x)[:, [0, 2]].set(1.0)).shape == (0, 3)
    with pytest.raises(eg.SelectionError):
        eg.at(x)[0].get()


def test_without_an_index_a_place_is_the_whole_tensor(fw):
    x = fw.tensor([[1.0, 2.0]])
    assert fw.numpy(eg.at(x).get()).tolist() == [[1, 2]]
    assert fw.numpy(eg.at(x).set(3.0)).tolist() == [[3, 3]]
    assert fw.numpy(eg.at(x).multiply(fw.tensor([2.0, 3.0]))).tolist() == [[2, 6]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("verb", ["set", "add", "multiply", "apply", "only", "stop", "get"])
@pytest.mark.parametrize("index", [1, slice(1, 2), [1], np.array([False, True, False])], ids=str)
def test_nan_in_an_untouched_element_stays_there(fw, verb, bad, index):
    def loss(x, value):
        edited = run(fw, verb, x, index, value if verb in ("set", "add", "multiply") else None)
        return fw.sum(edited if verb == "get" else eg.at(edited)[1:].get() ** 2)

    gradient, of_value = fw.grad(loss, fw.tensor([bad, 2.0, 3.0]), fw.tensor(5.0))
    assert gradient[0] == 0
    assert np.isfinite(gradient).all()
    assert np.isfinite(of_value).all()


def test_a_bad_upstream_gradient_stays_with_its_element(fw):
    def loss(x):
        return fw.sum(eg.at(x)[1].only() * fw.tensor([np.inf, 2.0, np.nan]))

    assert fw.grad(loss, fw.tensor([1.0, 1.0, 1.0]))[0].tolist() == [0, 2, 0]


def test_texts_are_no_numbers():
    texts = tf.constant(["a", "b"])
    assert eg.at(texts)[0].get() == b"a"
    assert eg.at(texts)[0].set(texts[1]).numpy().tolist() == [b"b", b"b"]
    with pytest.raises(eg.DtypeError, match="a non-numeric value does not fit a tensor of"):
        eg.at(TENSORFLOW.tensor([1.0]))[0].set(texts[0])
    with pytest.raises(eg.DtypeError, match="does not fit a tensor of"):
        eg.at(texts)[0].set(1.0)


@pytest.mark.parametrize("verb", ["set", "add", "multiply"])
@pytest.mark.parametrize("shape", [(3,), (2, 1, 2), (2, 2, 2)])
def test_a_value_that_does_not_broadcast_is_refused(fw, verb, shape):
    x = fw.tensor(np.zeros((4, 2)))
    for index in (slice(0, 2), [0, 1]):
        with pytest.raises(eg.BroadcastError, match=r"a value of shape .* does not broadcast to the \(2, 2\) elements"):
            getattr(eg.at(x)[index], verb)(fw.tensor(np.zeros(shape)))


def test_tensors_of_the_framework_are_indices(fw):
    x = fw.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert fw.numpy(eg.at(x)[fw.tensor([1, -2], "int32"), fw.tensor(1, "int64")].get()).tolist() == [4, 2]
    assert fw.numpy(eg.at(x)[x > 1.5].set(0.0)).tolist() == [[1, 0], [0, 0]]
    with pytest.raises(eg.SelectionError, match="index 2 is out of range for axis 0 of size 2"):
        eg.at(x)[fw.tensor([2], "int64")].get()


def test_nothing_is_changed_in_place(fw):
    array = np.arange(6.0).reshape(2, 3)
    x, value = fw.tensor(array), fw.tensor([7.0, 8.0, 9.0])
    for verb in ("set", "add", "multiply"):
        for index in (0, [1], slice(0, 1)):
            getattr(eg.at(x)[index], verb)(value)
    eg.at(x)[0].only()
    eg.at(x)[0].stop()
    for index in (0, [0, 1], slice(None)):

        def in_place(taken):
            if fw is TORCH:
                taken.mul_(10)
            return taken * 2

        eg.at(x)[index].apply(in_place)
    assert np.array_equal(fw.numpy(x), array)
    assert fw.numpy(value).tolist() == [7, 8, 9]
