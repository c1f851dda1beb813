"""Fill the column "shown by" of the promise tables in docs/ from the markers of tests. `make promises` runs this.

A test that proves a promise is marked `@pytest.mark.promise("…")`, with the text of the promise in the page. A
`pytestmark` marks all tests of its file.
"""

import ast
import os
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs" / "reliability.md", ROOT / "docs" / "security.md")
HEADER = "| promise | shown by |"


@dataclass(frozen=True, order=True)
class PromiseTest:
    """A test function in `path`. `is_long`: only `make test-all` runs it."""

    path: Path
    name: str
    is_long: bool


def promise_tests(root: Path = ROOT / "tests") -> dict[str, list[PromiseTest]]:
    """The tests of each promise, by the text of its marker."""
    tests: dict[str, list[PromiseTest]] = defaultdict(list)
    for path in sorted(root.rglob("test_*.py")):
        source = path.read_text()
        if ".promise(" not in source:
            continue
        tree = ast.parse(source)
        file_marks = [mark for node in tree.body if _is_pytestmark(node) for mark in _marks(node)]
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                marks = [*file_marks, *(mark for decorator in node.decorator_list for mark in _marks(decorator))]
                is_long = any(name in ("long", "kube") for name, _ in marks)
                for name, text in marks:
                    if name == "promise":
                        tests[text].append(PromiseTest(path, node.name, is_long))
    return dict(tests)


def rows(page: str) -> list[str]:
    """The text of each promise in the tables of a page."""
    return [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line in _table_rows(page)]


def with_tests(page: str, tests: dict[str, list[PromiseTest]], folder: Path = ROOT / "docs") -> str:
    """A page with links to the files of the tests of each promise. A promise without a test has an empty cell."""
    for row in _table_rows(page):
        cells = row.removeprefix("| ").removesuffix(" |").split(" | ")
        files = sorted({test.path for test in tests.get(cells[0], [])})
        cells[1] = ", ".join(f"[{path.stem}]({os.path.relpath(path, folder)})" for path in files)
        page = page.replace(row, "| " + " | ".join(cells) + " |")
    return page


def _table_rows(page: str) -> list[str]:
    tables = re.findall(rf"^{re.escape(HEADER)}.*\n\|[-|]+\n((?:\|.*\n)*)", page, re.MULTILINE)
    return [row for table in tables for row in table.splitlines()]


def _is_pytestmark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"


def _marks(node: ast.AST) -> list[tuple[str, str]]:
    """Names of the markers `pytest.mark.NAME` within `node`, each with its text or ""; not those of single parameters."""
    if isinstance(node, ast.Assign):
        node = node.value
    if isinstance(node, ast.List):
        return [mark for element in node.elts for mark in _marks(element)]
    arguments = node.args if isinstance(node, ast.Call) else []
    name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    if not name.startswith("pytest.mark."):
        return []
    texts = [argument.value for argument in arguments if isinstance(argument, ast.Constant)]
    return [(name.removeprefix("pytest.mark."), str(texts[0]) if texts else "")]


def main() -> None:
    tests = promise_tests()
    for path in PAGES:
        path.write_text(with_tests(path.read_text(), tests))
        print(f"{path.relative_to(ROOT)}: {len(rows(path.read_text()))} promises")


if __name__ == "__main__":
    main()
