"""Pages in a headless Chromium, where one is installed."""

import contextlib
import shutil
from collections.abc import Iterator

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_a_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")


@contextlib.contextmanager
def opened(address: str, *flags: str) -> Iterator:
    """A page of Playwright's, loaded; an error of its scripts on the way is a failure.

    ``page.evaluate(function, argument)`` waits for what the function's promise returns, however
    slow the machine is.
    """
    from playwright.sync_api import sync_playwright

    quiet = "--disable-quic", "--no-first-run", "--disable-component-update", "--disable-sync"
    errors = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=BROWSER,
            args=["--no-sandbox", "--disable-background-networking", *quiet, *flags],
        )
        page = browser.new_page()
        page.set_default_timeout(300_000)
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        yield page
        browser.close()
    assert not errors
