"""A command that has started processes ends them before it ends, also when it is asked to end."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

_ASKED = (signal.SIGTERM, signal.SIGHUP)


def end_in_order_when_asked() -> None:
    """From now on SIGTERM, and SIGHUP if it is heard at all, end this process as an exception does: with code 128 + N.

    So what contexts hold is let go of; to be asked twice does not disturb that. Call it on the main thread.
    """
    for number in _ASKED:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _end)


def _end(number: int, _frame: object) -> NoReturn:
    for each in _ASKED:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)
