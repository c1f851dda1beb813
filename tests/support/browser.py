"""The real browser that pages are looked at with."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Playwright


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
