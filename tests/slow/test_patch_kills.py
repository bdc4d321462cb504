"""Five hundred kills in the long profile, and a sample of them in every slow run: the old weights or the new."""

import os

import pytest

from tests.support.made import LONG
from tests.train.test_patch_folders import kill_and_look


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kind", ["folder", "file", "diff"])
def test_kills_at_random_moments_leave_the_old_weights_or_the_new(tmp_path, kind):
    kill_and_look(tmp_path, 500 if LONG else 50, kind)
