"""The website is built from the pages, and works in a browser: no request to another host, and a search that finds."""

import re
import shutil
import threading
import tomllib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote_plus

import pytest
import yaml
from playwright.sync_api import Browser, Page, sync_playwright

from docs.site.build import build_site
from docs.site.pages import site_page, site_paths
from docs.site.reference import reference_pages
from tests.support.browser import chromium

ROOT = Path(__file__).parents[2]
TOP_FILES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "pyproject.toml")


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Do not write the requests to stderr."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_site(ROOT, tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def url(site: Path) -> Iterator[str]:
    handler = partial(QuietHandler, directory=str(site.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright, chromium(playwright) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page()
    yield page
    page.close()


def test_the_root_leads_to_the_newest_version(page: Page, url: str, site: Path) -> None:
    page.goto(url)
    page.wait_for_url(f"{url}{site.name}/")
    assert page.title() == "Start - tbe-serving"
    page.locator(".md-version__current").wait_for()
    assert page.locator(".md-version__current").inner_text() == site.name


@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 1280)])
def test_pages_load_nothing_from_other_hosts_and_fit_the_screen(
    browser: Browser, url: str, site: Path, scheme: str, width: int
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
    requests: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("response", lambda response: errors.append(response.url) if response.status >= 400 else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    for path in ("", "operating/", "benchmarks/", "api/client/", "commands/tbe-serve/"):
        page.goto(f"{url}{site.name}/{path}", wait_until="networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        red, green, blue = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (red + green + blue > 3 * 128) == (scheme == "light"), path
    page.close()
    assert [address for address in requests if not address.startswith(url)] == []
    assert errors == []


@pytest.mark.parametrize(
    "path", ["settings/", "reliability/", "security/", "versions/", "metrics/", "logs/", "bundle/", "protocol/"]
)
def test_tables_fit_a_phone_without_scrolling(browser: Browser, url: str, site: Path, path: str) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto(f"{url}{site.name}/{path}")
    rooms = page.eval_on_selector_all(
        ".md-typeset table",
        "tables => tables.map(table => [table.scrollWidth, table.closest('.md-content').clientWidth])",
    )
    page.close()
    assert rooms
    assert [(table, room) for table, room in rooms if table > room] == []


# What somebody types, and the page that is to be among the first three results.
SEARCHES = {
    "checkpoint prefix": "export/",
    "settings in a TOML file": "settings/",
    "look up from Python": "clients/",
    "certificate renewal": "tls/",
    "TbeSlow": "runbook/",
    "publish_changes": "api/export/",
    "shard large tables over ranks": "sharding/",
    "rolling out canary": "rolling-out/",
    "NetworkPolicy": "kubernetes/",
    "LookupClient timeout_s": "api/client/",
    "DEADLINE_EXCEEDED": "errors/",
    "scrape Prometheus token": "monitoring/",
    "make certificates": "tls/",
    "Go client": "other-languages/",
}


def test_the_search_finds_pages_among_the_first_three(page: Page, url: str, site: Path) -> None:
    page.goto(f"{url}{site.name}/", wait_until="networkidle")
    page.keyboard.press("/")
    page.get_by_role("combobox").wait_for()  # letters that are typed before the search is there are lost
    for query, path in SEARCHES.items():
        page.keyboard.press("Control+A")
        page.keyboard.type(query)
        # Each result names the query that found it. While the index is being read, results of a part of it are shown.
        results = page.locator(f"a[href*='?h={quote_plus(query)}']")
        results.first.wait_for()
        expected = f"{url}{site.name}/{path}"
        for _ in range(20):
            links: list[str] = results.evaluate_all("results => results.slice(0, 3).map(result => result.href)")
            if any(link.startswith(expected) for link in links):
                break
            page.wait_for_timeout(250)
        else:
            pytest.fail(f"{query}: {expected} is not among {links}")


@pytest.mark.long  # that the site is built at all shows that all anchors are there
def test_a_broken_anchor_fails_the_build_and_keeps_the_old_site(tmp_path: Path) -> None:
    for name in TOP_FILES:
        shutil.copy(ROOT / name, tmp_path)
    for name in ("deploy", "docs", "examples", "export", "serving"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "docs" / "sharding.md").open("a") as file:
        file.write("\n[limits](export.md#no-such-heading)\n")
    published = tmp_path / "out" / "0.0.9"
    published.mkdir(parents=True)
    (published / "index.html").write_text("the version before")
    with pytest.raises(RuntimeError, match="anchor does not exist"):
        build_site(tmp_path, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["0.0.9"]


def test_each_page_is_published_as_markdown_and_listed_for_language_models(site: Path) -> None:
    listed = re.findall(r"\]\(([^)]+)\)", (site / "llms.txt").read_text())
    assert len(listed) > 30
    for path in listed:
        assert (site / path).read_text().startswith("# "), path
        assert (site / path.removesuffix("index.md").removesuffix(".md") / "index.html").exists(), path


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[how](export.md#scores)", "[how](export.md#scores)"),
        ("[README](../README.md#use-it)", "[README](index.md#use-it)"),
        ("[why](decisions/README.md)", "[why](decisions/index.md)"),
        ("[test_files](../tests/serving/test_files.py)", "`test_files`"),
        ("[the image](../deploy/Dockerfile)", "[the image](deploy/Dockerfile)"),
        ("[clients](../examples/clients/README.md)", "[clients](other-languages.md)"),
        ("[the filter](../serving/server/process_setup.py)", "the filter (`serving/server/process_setup.py`)"),
        ("![way](way.svg)", "![way](way.svg)"),
        ("[here](#scores)", "[here](#scores)"),
        ("[x](https://example.com/a.md)", "[x](https://example.com/a.md)"),
        ("```\n[a](../deploy/Dockerfile)\n```", "```\n[a](../deploy/Dockerfile)\n```"),
    ],
)
def test_links_lead_to_pages_of_the_site(link: str, expected: str) -> None:
    assert site_page(link, "docs/operating.md", site_paths(ROOT)) == expected


def test_the_site_has_the_files_that_its_pages_link(site: Path) -> None:
    for path in ("deploy/Dockerfile", "deploy/prometheus/alerts.yaml", "serving/protocol/descriptors.binpb"):
        assert (site / path).read_bytes() == (ROOT / path).read_bytes()
    programs = (site / "other-languages.md").read_text()
    assert (ROOT / "examples" / "clients" / "go" / "ranker.go").read_text() in programs
    assert "make test-all" in programs


def test_every_page_is_in_the_navigation() -> None:
    pages = {path for path in site_paths(ROOT).values() if path.endswith(".md")} | reference_pages().keys()
    navigation = (ROOT / "docs" / "site" / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert sorted(re.findall(r"[\w/-]+\.md", navigation)) == sorted(pages)


def test_links_between_folders_are_relative() -> None:
    paths = site_paths(ROOT)
    assert site_page("[a](../export.md)", "docs/decisions/0001-pins.md", paths) == "[a](../export.md)"
    assert site_page("[a](docs/export.md)", "README.md", paths) == "[a](export.md)"


def test_the_citation_names_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project["version"], project["license"].split(" AND ")[0])
