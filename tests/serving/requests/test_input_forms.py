"""The table of input forms and its documentation."""

import re
from pathlib import Path

from serving.requests.input_forms import INPUT_FORMS

PAGE = Path(__file__).parents[3] / "docs" / "input-forms.md"


def test_docs_list_the_forms() -> None:
    documented = re.findall(r"^\| ([^|]+) \| `", PAGE.read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(form.name for form in INPUT_FORMS)
