"""Options that come from calls in a script: `tr.env.ctrl_port(9988)` starts an agent with `--ctrl_port=9988`.

The user has never written such an option. So where a message names one, the call from the script is put before it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping

from trainer_runtime.contract import SCRIPT_CALLS

_calls: dict[str, str] = {}
"""The call in the script, by option."""


def take_calls() -> None:
    """Read the calls from the environment, and remove them there, so that no child process inherits them."""
    _calls.clear()
    try:
        calls = json.loads(os.environ.pop(SCRIPT_CALLS, "{}"))
    except ValueError:
        return
    if isinstance(calls, Mapping):
        _calls.update({str(option): str(call) for option, call in calls.items()})


def with_calls(text: str) -> str:
    """Return the message with the first mention of each such option written as `CALL (OPTION)`."""
    for option, call in _calls.items():
        found = re.search(rf"(?<![\w-]){option}(?:=\S*[^\s:;,.)])?(?![\w-])", text)
        if found:
            text = f"{text[: found.start()]}{call} ({found[0]}){text[found.end() :]}"
    return text
