"""The reference pages in docs/reference, made from the code.

Options and their variables come from the declarations of the command line. Everything else is read from the source with
`ast`, so that nothing of the agent is run: docstrings under fields and constants are their descriptions.
`tests/unit/test_reference.py` fails when a committed page differs from what is made here.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from reference_pages.environment import environment_page
from reference_pages.exit_codes import exit_codes_page
from reference_pages.metrics import metrics_page
from reference_pages.options import options_page
from reference_pages.records import etcd_keys_page, records_page
from reference_pages.source import ROOT

PAGES = ROOT / "docs" / "reference"


@cache
def pages() -> dict[str, str]:
    """The content of each page, by file name."""
    return {
        "options.md": options_page(),
        "environment.md": environment_page(),
        "exit-codes.md": exit_codes_page(),
        "etcd-keys.md": etcd_keys_page(),
        "records.md": records_page(),
        "metrics.md": metrics_page(),
    }


def differing(directory: Path = PAGES) -> list[str]:
    """Names of pages that differ from the code, are missing, or are not made by this script."""
    made = pages()
    present = {path.name: path.read_text(encoding="utf-8") for path in directory.glob("*.md")}
    return sorted(name for name in made.keys() | present.keys() if made.get(name) != present.get(name))
