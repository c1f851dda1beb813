"""The pages hang together: links and their headings exist, and the index has every decision."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target, heading in re.findall(r"\]\((?!http)([^)#\s]*)(?:#([^)]+))?\)", page.read_text()):
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), target
        assert not heading or heading in anchors(there), f"{target}#{heading}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_tests_named_on_a_page_exist(page: Path) -> None:
    text = page.read_text()
    folders = "|".join(path.name for path in ROOT.iterdir() if (path / "__init__.py").exists())
    for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name
    for test in re.findall(r"`(test_\w+)`", text):
        assert any(f"def {test}(" in path.read_text() for path in (ROOT / "tests").rglob("test_*.py")), test


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_an_empty_line_follows_every_table(page: Path) -> None:
    """Markdown takes the next line for a row of the table."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^\|.*\n(?=[^|\n])(.*)", text, re.MULTILINE) == []


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("*.svg")), ids=lambda picture: picture.stem)
def test_a_drawing_is_readable_in_both_modes_and_by_screen_readers(picture: Path) -> None:
    """Its own background covers all of it, and nothing is taken from another file."""
    root = ElementTree.fromstring(picture.read_text())
    svg = "{http://www.w3.org/2000/svg}"
    assert root.findtext(f"{svg}title")
    assert root.findtext(f"{svg}desc")
    background = root.find(f"{svg}rect")
    assert background is not None
    assert root.attrib["viewBox"] == f"0 0 {background.attrib['width']} {background.attrib['height']}"
    assert background.attrib["fill"] == "#ffffff"
    assert "href" not in picture.read_text()
    assert any(f"]({picture.name})" in page.read_text() or f"/{picture.name})" in page.read_text() for page in PAGES)


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_the_index_has_every_decision(page: Path) -> None:
    number, title = re.findall(r"^# (\d+)\. (.+)\n", page.read_text())[0]
    assert int(number) == int(page.stem[:4])
    assert f"| {number} | [{title}]({page.name}) |" in (page.parent / "README.md").read_text()


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_has_at_most_300_words(page: Path) -> None:
    """The words of tables count, their bars and the targets of links do not."""
    text = re.sub(r"\|[-|]*|\]\([^)]*\)", " ", page.read_text())
    assert len(text.split()) <= 300
