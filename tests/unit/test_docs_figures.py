"""A figure that was measured says when, and with which commit: without them nobody can tell whether it still holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PERFORMANCE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
_ORIGIN = re.compile(r"\b20\d\d-\d\d-\d\d\b.*\bcommit [0-9a-f]{7,}\b", re.DOTALL)


def measured_tables(text: str) -> Iterator[tuple[str, str]]:
    """Yield the header of each table with a column `n`, and the paragraph under the table."""
    for table, below in re.findall(r"^((?:\|.*\n)+)\n((?:.+\n)*)", text, re.MULTILINE):
        header = table.splitlines()[0]
        if "n" in [cell.strip() for cell in header.split("|")]:
            yield header, below


def without_origin(text: str) -> list[str]:
    return [header for header, below in measured_tables(text) if not _ORIGIN.search(below)]


def test_each_measured_table_names_its_commit_and_date() -> None:
    text = PERFORMANCE.read_text(encoding="utf-8")
    assert len(list(measured_tables(text))) >= 8
    assert not without_origin(text)


def test_each_table_of_the_readme_names_its_commit_and_date() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(list(measured_tables(text))) == 2
    assert not without_origin(text)


@pytest.mark.parametrize(
    ("below", "is_fine"),
    [
        ("`scripts/bench micro`, 2026-11-22 15:36 UTC, 2 cores, commit 541eada, Python 3.11.7\n", True),
        ("`scripts/bench micro`, 2026-11-22 15:36 UTC,\n2 cores, commit 541eada\n", True),
        ("`scripts/bench micro`, commit 541eada\n", False),
        ("`scripts/bench micro`, 2026-11-22\n", False),
        ("Some other paragraph.\n\n`scripts/bench micro`, 2026-11-22, commit 541eada\n", False),
    ],
)
def test_commit_and_date_stand_in_the_paragraph_under_a_table(below: str, *, is_fine: bool) -> None:
    text = f"| what | n |\n| --- | --- |\n| commit | 3 |\n\n{below}"
    assert without_origin(text) == ([] if is_fine else ["| what | n |"])
