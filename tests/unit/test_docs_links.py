"""The documentation names only pages, headings, files and tests that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_FILE = re.compile(r"`((?:agent|trainer_runtime|scripts|tests|examples|deploy|docs)/[\w./-]+)`")
_TEST_FILE = re.compile(r"`((?:unit|integration|contract|simulation|chaos)/\w+\.py)")
_TEST = re.compile(r"`(test_\w+)`")


def prose(page: Path) -> str:
    """The text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@cache
def code_of_tests() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("*.py")))


def broken_links(page: Path) -> list[str]:
    found = []
    for link in _LINK.findall(prose(page)):
        if "://" in link:
            continue
        file, _, heading = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (heading and heading not in map(anchor, _HEADING.findall(prose(target)))):
            found.append(link)
    return found


def missing_names(text: str) -> list[str]:
    files = [name for name in _FILE.findall(text) if not (ROOT / name).exists()]
    files += [name for name in _TEST_FILE.findall(text) if not (ROOT / "tests" / name).exists()]
    return files + [name for name in _TEST.findall(text) if f"def {name}(" not in code_of_tests()]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_files_and_tests_that_a_page_names_exist(page: Path) -> None:
    """Decisions are records of their time and keep the names of then."""
    if page.parent.name != "decisions":
        assert not missing_names(prose(page))


def test_every_page_is_in_the_index() -> None:
    listed = {(DOCS / link.partition("#")[0]).resolve() for link in _LINK.findall(prose(DOCS / "index.md"))}
    pages = {page for page in PAGES if page.parent.name != "decisions" and page.name not in {"index.md", "README.md"}}
    assert not pages - listed


def test_what_is_missing_is_found() -> None:
    assert missing_names("`agent/nowhere.py`, `unit/test_nothing.py`, `test_that_is_not_there_at_all_`") == [
        "agent/nowhere.py",
        "unit/test_nothing.py",
        "test_that_is_not_there_at_all_",
    ]
    assert anchor("Is the node fit?") == "is-the-node-fit"
    assert anchor("The threat model, on a page") == "the-threat-model-on-a-page"
