"""The figures of AUC by dtype. `test_dtype_page.py` draws them."""

from export.compare.auc_figures import _LOOKS
from serving.bundle.formats import WeightDtype


def test_each_dtype_has_a_colour_and_a_marker_of_its_own() -> None:
    assert _LOOKS.keys() == {dtype.value.lower() for dtype in WeightDtype}
    assert (
        len({colour for colour, _ in _LOOKS.values()})
        == len({marker for _, marker in _LOOKS.values()})
        == len(_LOOKS)
    )
