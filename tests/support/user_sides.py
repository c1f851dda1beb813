"""Bundles whose user side is used from a number of items on that no clock decides."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from export.user_side import fewest_items


@contextmanager
def used_from(items: int | None) -> Iterator[None]:
    """Within the block, exports measure no times, and find these `fewest_items`: one of `SIZES`, or None."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fewest_items, "time_of_once", lambda *of: 2.0 if items is None or of[-1] < items else 0.5)
        yield
