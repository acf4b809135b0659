"""Text of a worker's on a terminal: what would command the terminal is shown, and not obeyed.

An escape sequence can set the window's title, move the cursor over lines that others have written, fill the clipboard,
or have the terminal type something. Colours and tabs do no harm.

Used by the guardian too (`guardian.py`), so standard library only.
"""

from __future__ import annotations

import re

_COMMANDING = re.compile(r"\x1b\[[0-9;:]*m|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\udc80-\udcff]")
"""Colours, which pass, and else control characters of both sets, and bytes that are no UTF-8."""


def harmless(text: str) -> str:
    r"""Return the text with its control characters written out: `\x1b` for an escape. Lines and colours stay."""
    return _COMMANDING.sub(_written_out, text)


def harmless_bytes(text: bytes) -> bytes:
    """The same of bytes, whatever they are."""
    return harmless(text.decode(errors="surrogateescape")).encode()


def _written_out(found: re.Match[str]) -> str:
    return found[0] if len(found[0]) > 1 else f"\\x{ord(found[0]) & 0xFF:02x}"
