"""The real browser that pages are looked at with."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, Playwright, sync_playwright


@contextmanager
def chromium(playwright: Playwright) -> Iterator[Browser]:
    """A headless Chromium: the one that `requirements/test-tools.sh` installs, or is on the PATH."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path is not None, "expected chromium on the PATH: run requirements/test-tools.sh"
    # Its sandbox does not run as root, as containers do.
    browser = playwright.chromium.launch(executable_path=path, chromium_sandbox=os.geteuid() != 0)
    try:
        yield browser
    finally:
        browser.close()


@contextmanager
def opened(file: Path) -> Iterator[Page]:
    """A file as a page, in a browser that has no network. The page asks for nothing, and its console says nothing."""
    with sync_playwright() as playwright, chromium(playwright) as browser:
        page = browser.new_context(offline=True, viewport={"width": 1100, "height": 900}).new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if request.url.startswith("http") else None)
        page.goto(file.as_uri())
        yield page
        assert said == []
