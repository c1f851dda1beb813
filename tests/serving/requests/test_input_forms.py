"""The table of input forms and its documentation."""

import re
from pathlib import Path

from serving.requests.input_forms import INPUT_FORMS

PROTOCOL = Path(__file__).parents[3] / "docs" / "protocol.md"


def test_docs_list_the_forms() -> None:
    section = PROTOCOL.read_text().partition("### How our clients take ids")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| ([^|]+) \| `", section, re.MULTILINE)
    assert sorted(documented) == sorted(form.name for form in INPUT_FORMS)
