"""Let a command that has started processes end them also when it gets a signal."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def exit_on_signals() -> None:
    """Make SIGTERM, and SIGHUP unless it is ignored, raise `SystemExit` with code 128 + N.

    So contexts are left in order; a second signal is ignored meanwhile. Call it on the main thread.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _exit)


def _exit(number: int, _frame: object) -> NoReturn:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)
