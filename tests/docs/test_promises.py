"""The promise tables of the docs are those that the markers of tests give."""

from pathlib import Path

import pytest

from tests.docs.promises import PAGES, PromiseTest, promise_tests, rows, with_tests

PROMISES = [promise for page in PAGES for promise in rows(page.read_text())]


def test_each_marker_has_a_row_and_each_row_a_test_of_make_test() -> None:
    tests = promise_tests()
    assert sorted(PROMISES) == sorted(tests)
    assert [promise for promise in PROMISES if all(test.is_long for test in tests[promise])] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_are_fresh(page: Path) -> None:
    assert page.read_text() == with_tests(page.read_text(), promise_tests()), "run `make promises`"


def test_markers_of_functions_and_of_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "test_some.py"
    path.write_text(
        'pytestmark = [pytest.mark.promise("all")]\n'
        '@pytest.mark.long\n@pytest.mark.promise("one")\n'
        "def test_one(): ...\n"
        '@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.long)])\n'
        "def test_other(number): ...\n"
        '@pytest.mark.promise("none")\n'
        "def helper(): ...\n"
    )
    one, other = PromiseTest(path, "test_one", True), PromiseTest(path, "test_other", False)
    assert promise_tests(tmp_path) == {"all": [one, other], "one": [one]}


def test_the_column_of_tests_alone_is_rewritten() -> None:
    table = "| promise | shown by | figure |\n|---|---|---|\n| all | old | 3 of 3 |\n| no | old |  |\n\n| a | b |\n"
    tests = {"all": [PromiseTest(Path("/r/tests/test_some.py"), "test_one", False)]}
    filled = with_tests(table, tests, Path("/r/docs"))
    assert "| all | [test_some](../tests/test_some.py) | 3 of 3 |\n| no |  |  |\n\n| a | b |\n" in filled
    assert rows(filled) == ["all", "no"]
