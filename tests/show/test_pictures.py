"""Pictures: numbers as colours and their limits, marks, and parts that are left out."""

import subprocess
import sys
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch

import elementgrad as eg
from elementgrad._show.pictures import draw_side_by_side
from elementgrad._show.style import Picture
from elementgrad._show.theme import get_theme

RNG = np.random.default_rng(0)
KINDS = {
    (): "vector",
    (7,): "vector",
    (1, 7): "vector",
    (3, 4): "matrix",
    (1, 1, 3, 4): "matrix",
    (3, 5, 6): "image",
    (1, 8, 5, 6): "channels",
    (2, 3, 5, 6): "channels",
}
"""How arrays are shown by their shape, with channels first."""


def artists(figure, gid):
    return [artist for artist in figure.findobj() if artist.get_gid() == gid]


def shown_as(figure):
    """The kind of a picture, by what is in it."""
    if artists(figure, "values"):
        return "vector"
    if len([axes for axes in figure.axes if axes.get_title()]) > 1:
        return "channels"
    return "matrix" if figure.axes[0].get_xlabel() else "image"


def data(figure, panel=0):
    return np.ma.filled(figure.axes[panel].images[0].get_array(), np.nan)


@pytest.mark.parametrize("shape", KINDS, ids=str)
def test_every_framework_is_shown_by_its_shape(fw, shape):
    values = RNG.normal(size=shape)
    figure = eg.plot(fw.tensor(values), channels="first")
    assert shown_as(figure) == KINDS[shape]
    assert str(shape) in figure.alt
    if KINDS[shape] == "matrix":
        np.testing.assert_array_equal(data(figure), values.reshape(3, 4))
    elif KINDS[shape] == "vector":
        (bars,) = [container for container in figure.axes[0].containers if container.get_label() is not None]
        np.testing.assert_allclose([bar.get_height() for bar in bars], values.reshape(-1))


def test_tensorflow_has_its_channels_last(fw):
    values = np.zeros((1, 5, 6, 8))
    values[0, 1, 2, 7] = 3.0
    figure = eg.plot(fw.tensor(values))
    last = fw.name == "tensorflow"
    names = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert names[0] == ("[0, ..., 0]" if last else "[0, 0]")
    assert len(names) == (8 if last else 5)
    other = eg.plot(fw.tensor(values), channels="last")
    np.testing.assert_array_equal(data(other, 7), values[0, :, :, 7])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_dtypes_of_every_framework_are_read(fw, dtype):
    np.testing.assert_array_equal(data(eg.plot(fw.tensor([[1, 2], [3, 4]], dtype))), [[1, 2], [3, 4]])


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 6)], ids=str)
def test_several_gradients_are_drawn_in_one_scale_under_their_names(shape):
    matrices = [RNG.normal(size=shape) * size for size in (1, 5, 2)]
    picture, _, alt = draw_side_by_side(matrices, ["a", "b", "c"], get_theme("dark"))
    images = picture.axes[0].images
    for image, matrix in zip(images, matrices, strict=True):
        np.testing.assert_array_equal(np.ma.filled(image.get_array(), np.nan), matrix)
        assert image.get_clim() == images[0].get_clim()
    names = artists(picture, "name")
    assert [name.get_text() for name in names] == ["a", "b", "c"]
    for name, image in zip(names, images, strict=True):
        left, _, _, top = image.get_extent()
        assert name.get_position()[0] == left
        assert name.get_position()[1] < top  # rows are counted downwards
    boxes = [image.get_extent() for image in images]
    apart = [a[1] < b[0] or a[2] < b[3] for a, b in pairwise(boxes)]
    assert all(apart)
    assert alt.startswith("Heat maps of 3 gradients, a, b, c: ")


def test_zero_is_in_the_middle_and_a_few_large_numbers_decide_nothing():
    values = np.where(np.arange(400).reshape(20, 20) % 2, 1.0, -1.0)
    assert eg.plot(values).axes[0].images[0].get_clim() == (-1.0, 1.0)
    values[3, 4], values[5, 6] = 500.0, -70.0
    figure = eg.plot(values)
    assert figure.axes[0].images[0].get_clim() == (-3.0, 3.0)
    assert figure.notes == ["2 of 400 numbers are beyond the scale, up to 500 in size"]
    assert figure.axes[1].get_ylim() == (-3.0, 3.0)
    wide = eg.plot(values, limit=600)
    assert wide.axes[0].images[0].get_clim() == (-600.0, 600.0)
    assert wide.notes == []
    middle = figure.axes[0].images[0].cmap(0.5)
    assert min(middle[:3]) > 0.95  # white on white paper
    assert max(eg.plot(values, theme="dark").axes[0].images[0].cmap(0.5)[:3]) < 0.2


def test_numbers_that_are_not_finite_are_set_apart():
    figure = eg.plot(np.array([[1.0, np.nan], [np.inf, -np.inf]]))
    assert figure.axes[0].images[0].get_clim() == (-1.0, 1.0)
    over = figure.axes[0].images[1].get_array()
    assert len({tuple(colour) for colour in over.reshape(-1, 4).tolist()}) == 4
    assert over[0, 0, 3] == 0
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["NaN (1)", "+inf (1)", "-inf (1)"]
    bars = eg.plot(np.array([1.0, np.nan, 2.0]))
    assert artists(bars, "NaN")[0].get_xdata().tolist() == [1.0]
    assert "1 NaN" in bars.alt


@pytest.mark.parametrize(
    ("mark", "where"),
    [
        ((1, 2), [(1, 2)]),
        (eg.at[1, -2], [(1, 2)]),
        ("x[1, 2:]", [(1, 2), (1, 3)]),
        (([0, 2], [0, 3]), [(0, 0), (2, 3)]),
    ],
    ids=str,
)
def test_marks_frame_elements(mark, where):
    frames = artists(eg.plot(np.ones((3, 4)), mark=mark), "mark")
    corners = dict.fromkeys([(frame.get_y() + 0.5, frame.get_x() + 0.5) for frame in frames])
    assert list(corners) == where


def test_marks_are_found_in_bars_and_feature_maps():
    (frame, _) = artists(eg.plot(np.arange(5.0), mark=3), "mark")
    assert frame.get_x() + 0.5 == 3
    values = np.zeros((40, 3, 5))
    values[:20] = 1.0
    figure = eg.plot(values, mark=(33, 1, 2))
    (panel,) = {frame.axes for frame in artists(figure, "mark")}
    assert panel.get_title() == "[33]"
    assert "16 of 40 feature maps: those with the largest gradients" in figure.notes


def test_a_field_stands_out_from_what_normalisation_leaves_on_every_pixel():
    gradient = RNG.normal(size=(1, 1, 64, 64)) * 1e-6
    gradient[0, 0, 20:25, 30:33] = 0.4
    gradient[0, 0, 22, 31] = 0.43
    for options in ({}, {"image": RNG.uniform(size=(64, 64))}):
        figure = eg.plot(gradient, channels="first", **options)
        assert figure.notes == [
            "15 of 4096 pixels carry 95 % of the size, in rows 20 to 24 and columns 30 to 32 (framed)"
        ]
        assert artists(figure, "field")
        assert figure.axes[-1].get_ylim() == (-0.43, 0.43)


def test_feature_maps_that_are_all_zero_are_said_so_and_not_drawn():
    figure = eg.plot(np.zeros((1, 24, 8, 8)))
    assert figure.notes == ["all of the 24 feature maps are zero, and one of them is drawn"]
    assert len(figure.axes) == 2  # one map and the colours


def test_huge_arrays_are_drawn_in_blocks_by_what_is_largest_in_them():
    values = np.zeros((2000, 3000))
    values[1999, 2999], values[5, 7], values[900, 901] = -4.0, 3.0, np.nan
    figure = eg.plot(values, mark=(1000, 2000))
    drawn = data(figure)
    assert drawn.shape == (250, 250)
    assert drawn[-1, -1] == -4.0
    assert drawn[0, 0] == 3.0
    assert np.isnan(drawn[112, 75])
    assert figure.notes[-1] == "each cell is the largest in size of 8 x 12 numbers"
    frame = artists(figure, "mark")[0]
    assert (frame.get_y(), frame.get_height()) == (999.5, 8)
    long = eg.plot(np.ones(1_000_000))
    assert len(artists(long, "values")) <= 257


def test_tokens_are_coloured_and_wrapped():
    tokens = ["a", "long", "sentence", "$x$", "", "of", "words"] * 8
    values = np.linspace(-1, 1, len(tokens))
    figure = eg.plot(values, tokens=tokens, mark=5)
    texts = artists(figure, "token") + artists(figure, "mark")
    assert len(texts) == len(tokens)
    assert [text.get_text() for text in artists(figure, "mark")] == ["of"]
    assert len({text.get_position()[1] for text in texts}) > 1
    by_features = eg.plot(np.ones((1, 3, 4)), tokens=["a", "b", "c"])
    assert by_features.notes == ["the length of the gradient over the 4 numbers of each token"]
    assert "the first 300 of 400 tokens" in eg.plot(np.ones(400), tokens=["x"] * 400).notes


def test_a_receptive_field_lies_over_its_image(fw):
    gradient = np.zeros((1, 1, 8, 8))
    gradient[0, 0, 2:5, 3:7] = 1.0
    image = RNG.uniform(size=(8, 8))
    figure = eg.plot(fw.tensor(gradient), image=fw.tensor(image[None, None]), channels="first")
    assert figure.notes == ["12 of 64 pixels have a gradient, in rows 2 to 4 and columns 3 to 6 (framed)"]
    frame = artists(figure, "field")[0]
    assert (frame.get_x(), frame.get_y(), frame.get_width(), frame.get_height()) == (2.5, 1.5, 4, 3)
    under = figure.axes[0].images[0].get_array()
    np.testing.assert_allclose(under, image / image.max())
    veil = figure.axes[1].images[1].get_alpha()
    assert (veil > 0).sum() == 12


def test_jacobians_are_spied_on_within_bounds(fw):
    figure = eg.plot(eg.jacobian(lambda x: x[:3] * x[3], fw.tensor(np.array([1.0, -2.0, 3.0, 4.0]))), mark=(1, 3))
    assert figure.notes[0] == "6 of 12 entries are not zero (50 %)"
    assert np.sign(data(figure)).tolist() == [[1, 0, 0, 1], [0, 1, 0, -1], [0, 0, 1, 1]]
    frame = artists(figure, "mark")[0]
    assert (frame.get_y(), frame.get_x()) == (0.5, 2.5)
    large = eg.jacobian(lambda x: x**2, fw.tensor(np.ones((30, 40))))
    figure = eg.plot(large)
    assert data(figure).shape == (128, 128)
    assert figure.notes[1].startswith("128 of 1200 rows and 128 of 1200 columns, evenly spread")
    assert (np.sign(data(figure)) == np.eye(128)).all()
    with pytest.raises(eg.SizeError, match="too many for a picture"):
        eg.plot(eg.jacobian(lambda x: x * x[0], fw.tensor(np.ones(3000))), kind="matrix")


def test_contributions_are_a_waterfall(fw):
    shares = eg.contributions(lambda x: 2 * x[2] - fw.sum(x), fw.tensor(np.array([1.0, 2.0, 3.0])), wrt="x[2]")
    figure = eg.plot(shares, title="y by x[2]")
    bars = [(bar.get_x(), bar.get_width()) for bar in figure.axes[0].containers[0]]
    assert sorted(width for _, width in bars) == [-1.0, 2.0]
    ends = [start + width for start, width in bars]
    assert [start for start, _ in bars] == [0.0, *ends[:-1]]
    assert figure.axes[0].containers[1][0].get_width() == ends[-1] == 1.0
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[-1] == "total"
    assert len(labels) == len(shares) + 1
    with pytest.raises(eg.SelectionError, match="name one element"):
        eg.plot(eg.contributions(lambda x: x * 2, fw.tensor(np.ones(3))))


def test_a_trace_and_what_was_trained_are_drawn():
    model = torch.nn.Linear(3, 2)
    elements = eg.trainable(model, ["weight[0, 1]", "bias"])
    trace, before = [], elements["weight[0, 1]"].item()
    optimizer = torch.optim.SGD(elements.parameters(), lr=0.1)
    for _ in range(4):
        trace.append({str(place): elements[place].tolist() for place in elements})
        optimizer.zero_grad()
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    figure = eg.plot(trace)
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[0].get_lines()}
    assert list(lines) == ["weight[0, 1]", "bias (0)", "bias (1)"]
    np.testing.assert_allclose(lines["weight[0, 1]"], before - 0.1 * np.arange(4), rtol=1e-6)
    figure = eg.plot(elements)
    (old,), (new,) = artists(figure, "before"), artists(figure, "after")
    np.testing.assert_allclose(new.get_xdata() - old.get_xdata(), [-0.4] * 3, rtol=1e-5)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["weight[0, 1]", "bias[0]", "bias[1]"]


REFUSED = {
    "a dict": (({"x": np.ones(2)},), {}, eg.FrameworkError, "one of its gradients"),
    "a text": (("x",), {}, eg.FrameworkError, "str is nothing to plot"),
    "complex": ((np.ones(2) * 1j,), {}, eg.DtypeError, "real part"),
    "a theme": ((np.ones(2),), {"theme": "blue"}, eg.OptionError, "theme='blue'"),
    "a kind": ((np.ones(2),), {"kind": "pie"}, eg.OptionError, "kind='pie' is none of vector"),
    "tokens": ((np.ones(3),), {"tokens": ["a"]}, eg.OptionError, "1 tokens for a gradient of shape"),
    "a text of tokens": ((np.ones(3),), {"tokens": "abc"}, eg.OptionError, "is not a list"),
    "no tokens": ((np.ones(3),), {"kind": "tokens"}, eg.OptionError, "needs tokens"),
    "an image": ((np.ones((3, 4)),), {"image": np.ones((4, 4))}, eg.BroadcastError, "3 rows and 4 columns"),
    "a mark": ((np.ones(3),), {"mark": 3}, eg.SelectionError, "out of range"),
    "a limit": ((np.ones(3),), {"limit": 0}, eg.OptionError, "limit=0"),
    "channels": ((np.ones((2, 3, 4)),), {"channels": "middle"}, eg.OptionError, "neither"),
    "images": ((np.ones((2, 3, 4, 4)),), {"kind": "image"}, eg.OptionError, "2 images"),
    "nothing": ((np.zeros((0, 5)),), {}, eg.OptionError, r"shape \(0, 5\) has no elements"),
    "sparse": ((torch.eye(3).to_sparse(),), {}, eg.FrameworkError, "is sparse"),
    "a marked trace": (([{"x": 1.0}],), {"mark": 0}, eg.OptionError, "mark is for arrays"),
    "steps": (([{"x": 1.0}, {"y": 1.0}],), {}, eg.OptionError, "different places"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_plots_are_refused_in_one_sentence(case):
    arguments, options, error, message = REFUSED[case]
    with pytest.raises(error, match=message) as raised:
        eg.plot(*arguments, **options)
    assert "\n" not in str(raised.value)


ODD = {"zeros": np.zeros((2, 3)), "tiny": np.full((2, 2), 1e-320), "huge": np.full(30, 1e300)}


@pytest.mark.parametrize("values", ODD.values(), ids=ODD)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_odd_numbers_are_drawn_without_a_warning(values, theme):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = eg.plot(values, theme=theme, title="<odd> $x")
        assert isinstance(figure, Picture)
        assert figure._repr_png_()[:4] == b"\x89PNG"
        assert b"</svg>" in figure.save("svg")


def test_nothing_of_matplotlib_is_changed_and_no_screen_is_needed():
    code = """
import sys, matplotlib, numpy, elementgrad as eg
settings = [name for name in matplotlib.rcParams if name != "backend"]  # which is chosen when it is looked at
before = [matplotlib.rcParams[name] for name in settings]
eg.plot(numpy.ones((3, 3)), theme="dark", mark=(1, 1)).save("png")
print("matplotlib.pyplot" in sys.modules, before == [matplotlib.rcParams[name] for name in settings])
"""
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert made.stdout.split() == ["False", "True"], made.stderr


def test_numbers_of_which_none_is_finite_have_no_range():
    assert "2 numbers, none of them finite" in eg.plot([np.nan, np.inf]).alt
    assert "2 numbers from 2 to 2" in eg.plot([np.nan, 2.0]).alt


@pytest.mark.parametrize("shape", [(100,), (1, 1, 100), (9, 8), (1, 3, 9, 8), (9, 8, 3)], ids=str)
def test_a_place_is_framed_in_its_tensor(fw, shape):
    x = fw.tensor(RNG.normal(size=shape))
    channels = "last" if shape[-1] == 3 else "first"
    flat = shape[-1] == 100
    rows, columns = (range(1), range(2, 5)) if flat else (range(2, 5), range(1, 3))
    block = (slice(2, 5),) if flat else (slice(2, 5), slice(1, 3))
    before = (0,) * (len(shape) - len(block) - (channels == "last"))
    figure = eg.plot(eg.at("x")[(*before, *block)], image=x, channels=channels)
    (veil,) = artists(figure, "outside")
    inside = veil.get_array()[..., 3] == 0
    assert np.argwhere(inside).tolist() == [[row, column] for row in rows for column in columns]
    assert "are in the field" in figure.notes[0]


def test_a_place_needs_its_tensor_to_be_drawn():
    with pytest.raises(eg.OptionError, match="give that, as in"):
        eg.plot(eg.at("x")[2])
    with pytest.raises(eg.OptionError, match="tokens is for arrays"):
        eg.plot(eg.at("x")[2], image=torch.ones(3), tokens=["a", "b", "c"])
