"""Bundles whose user side is used from a number of items on that no clock decides."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from export.user_side import fewest_items


@contextmanager
def used_from(items: int | None) -> Iterator[None]:
    """Within the block, exports measure no times, and find these `fewest_items`: one of `SIZES`, or None."""
    with pytest.MonkeyPatch.context() as patch:
        times = {size: 0.5 if items is not None and size >= items else 2.0 for size in fewest_items.SIZES}
        patch.setattr(fewest_items, "relative_time", lambda whole, _: times[len(whole.args[0])])
        yield
