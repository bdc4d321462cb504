"""One table: a call that cannot work, its error, and the sentence that says why, on the frameworks it applies to."""

import pytest

import elementgrad as eg
from tests.refusals import of_jax, of_tensorflow, of_torch
from tests.refusals.everywhere import EVERYWHERE, RING, WITHOUT

OWN = {"torch": of_torch.ROWS, "tensorflow": of_tensorflow.ROWS, "jax": of_jax.ROWS, "none": WITHOUT}


def assert_refused(call, error, text):
    with pytest.raises(error, match=text) as caught:
        call()
    if isinstance(caught.value, eg.ElementgradError) and not isinstance(caught.value, eg.ParseError):
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", EVERYWHERE)
def test_impossible_calls_are_refused_on_every_framework(fw, case):
    call, error, text = EVERYWHERE[case]
    both = " and ".join(sorted([fw.name, RING[fw].name]))
    names = {"{fw}": fw.name, "{other}": RING[fw].name, "{both}": both}
    for placeholder, name in names.items():
        text = text.replace(placeholder, name)
    assert_refused(lambda: call(fw), error, text)


@pytest.mark.parametrize(("framework", "case"), [(name, case) for name, rows in OWN.items() for case in rows])
def test_impossible_calls_are_refused(framework, case):
    assert_refused(*OWN[framework][case])
