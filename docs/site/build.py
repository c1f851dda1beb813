"""Build the website: write its pages, have zensical render them strictly, and add the Markdown beside the HTML."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

from docs.site.pages import site_page, site_paths, with_programs
from docs.site.reference import reference_pages

_CONFIG = Path(__file__).with_name("mkdocs.yml")
_STYLE = Path(__file__).with_name("extra.css")
_CELL = re.compile(r"<t[dh][ >].*?</t[dh]>", re.DOTALL)
_TEXT = re.compile(r"(?<=>)[^<]+")
_PUNCTUATION = re.compile(r"[_/=:,\]](?=[\w{\[&])|(?<=[a-z])\.(?=[a-z])")
# The page about clients in other languages, on which the site shows their programs.
_CLIENTS = "examples/clients/README.md"


def build_site(root: Path, out: Path) -> Path:
    """Build the website of the repository at `root` into `out`/VERSION, and return that folder.

    zensical checks links, anchors and the names of the Python API. If one is wrong, the build fails, and `out` keeps
    the site that it has. Other versions in `out` stay, and the menu of versions lists them.

    Raises:
        RuntimeError: with what zensical printed.
    """
    version = str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".draft-", dir=out) as name:
        work = Path(name)
        pages = _write_pages(root, work / "pages")
        # The configuration names the pages, the site and the source by these names.
        shutil.copy(_CONFIG, work)
        (work / "source").symlink_to(root)
        _render(work)
        for page in (work / "site").rglob("*.html"):
            page.write_text(break_names(page.read_text()))
        _write_markdown(pages, work / "site")
        shutil.rmtree(out / version, ignore_errors=True)
        (work / "site").rename(out / version)
    _write_versions(out, version)
    return out / version


def break_names(html: str) -> str:
    """A page whose long names in tables can break after punctuation, so that tables fit a phone."""

    def with_breaks(cell: re.Match[str]) -> str:
        return _TEXT.sub(lambda text: _PUNCTUATION.sub(r"\g<0><wbr>", text.group()), cell.group())

    return _CELL.sub(with_breaks, html)


def _write_pages(root: Path, folder: Path) -> dict[str, str]:
    """Write every page, image and download of the site, and return the pages' Markdown by path."""
    paths = site_paths(root)
    pages = reference_pages()
    for source, path in paths.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".md"):
            pages[path] = site_page((root / source).read_text(), source, paths)
        else:
            shutil.copy(root / source, target)
    pages[paths[_CLIENTS]] = with_programs(pages[paths[_CLIENTS]], root)
    shutil.copy(_STYLE, folder)
    _write_markdown(pages, folder, index=False)
    return pages


def _render(work: Path) -> None:
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict", "--config-file", "mkdocs.yml"]
    result = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"zensical: exit code {result.returncode}\n{result.stdout}{result.stderr}")


def _write_markdown(pages: Mapping[str, str], folder: Path, *, index: bool = True) -> None:
    """Write the pages as Markdown, and with `index` also llms.txt, which lists them for language models."""
    for path, text in pages.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    if index:
        titles = [f"- [{text.split(chr(10), 1)[0].lstrip('# ')}]({path})" for path, text in sorted(pages.items())]
        (folder / "llms.txt").write_text("\n".join(["# tbe-serving", "", "## Pages", "", *titles, ""]))


def _write_versions(out: Path, newest: str) -> None:
    """List the versions in `out` for the site's menu, and send readers of its root to the newest."""
    versions = sorted((path.parent.name for path in out.glob("*/index.html")), reverse=True)
    entries = [{"version": version, "title": version, "aliases": []} for version in versions]
    (out / "versions.json").write_text(json.dumps(entries))
    (out / "index.html").write_text(
        f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={newest}/">'
        f'<title>tbe-serving</title><a href="{newest}/">tbe-serving {newest}</a>\n'
    )
