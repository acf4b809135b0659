"""Writes the reference pages in docs/reference from the code, or checks them. Run by `scripts/reference`."""

from __future__ import annotations

import argparse
import sys

from reference_pages import PAGES, differing, pages
from reference_pages.source import ROOT


def main() -> None:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(prog="scripts/reference")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page differs")
    if parser.parse_args().check:
        wrong = differing()
        if wrong:
            sys.exit(f"reference: differs from the code: {', '.join(wrong)}; run scripts/reference")
        return
    PAGES.mkdir(parents=True, exist_ok=True)
    for name in differing():
        path = PAGES / name
        text = pages().get(name)
        if text is None:
            path.unlink()
        else:
            path.write_text(text, encoding="utf-8")
        print(f"reference: {'removed' if text is None else 'wrote'} {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
