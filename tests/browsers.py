"""A real browser, and visits with it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest

_CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]


@contextmanager
def browser_open() -> Iterator[Any]:
    """The browser of the distribution; the test is skipped where there is none, except in CI."""
    if _CHROMIUM is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(
            "no chromium on PATH (scripts/system-packages installs it)"
        )
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the extra `dev`)")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=_CHROMIUM, args=_FLAGS)
        yield started
        started.close()


class Visit:
    """A page that was opened, and all that it did meanwhile."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:  # noqa: ANN401 - it may not be installed
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.said: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.goto(url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.context.close()
