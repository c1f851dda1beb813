"""A file that describes tables nobody has trained yet."""

import re
from pathlib import Path

import pytest

from export.commands.settings import read_tables
from serving.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[tables.a]\nrows = 0\ndim = 8\n", "table 'a': expected rows > 0"),
        ("[tables.a]\nrows = 9\ndim = 6\n", "a dim that is a multiple of 4"),
        ("[tables.a]\nrows = 9\n", "missing required field `dim`"),
        (
            "[tables.a]\nrows = 9\ndim = 8\ncolour = 1\n",
            "t.toml: [tables.a]: unknown key 'colour': expected one of rows, dim, pooling_factor, pooling, features",
        ),
        ("[tables.a]\nrows = 9\ndim = 8\npooling = 'max'\n", "expected sum or mean, got 'max'"),
        ("[tables.a]\nrows = 9\ndim = 8\npooling_factor = 0\n", "pooling_factor: expected > 0"),
        (
            "[tables.a]\nrows=9\ndim=8\n[tables.b]\nrows=9\ndim=8\nfeatures=['a']\n",
            "feature 'a': expected it in one table",
        ),
        ("tables = {}\n", "expected a table such as [tables.item]"),
        ("tables = [\n", "t.toml"),
    ],
)
def test_a_file_of_tables_that_is_wrong_is_refused_by_name(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "t.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=re.escape(why)):
        read_tables(tmp_path / "t.toml")
