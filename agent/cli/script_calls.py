"""Options that stand for calls in a script: `tr.env.ctrl_port(9988)` made its process an agent with `--ctrl_port=9988`.

Whoever reads a message about such an option has never written it. So the first time that a message names it, the call
comes before it, as the script has it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping

from trainer_runtime.contract import SCRIPT_CALLS

_calls: dict[str, str] = {}
"""By option."""


def take_calls() -> None:
    """Take what the script said from the environment, which others are not to inherit."""
    _calls.clear()
    try:
        told = json.loads(os.environ.pop(SCRIPT_CALLS, "{}"))
    except ValueError:
        return
    if isinstance(told, Mapping):
        _calls.update({str(option): str(call) for option, call in told.items()})


def with_calls(text: str) -> str:
    """A message, with the calls of the script that its options stand for."""
    for option, call in _calls.items():
        found = re.search(rf"(?<![\w-]){option}(?:=\S*[^\s:;,.)])?(?![\w-])", text)
        if found:
            text = f"{text[: found.start()]}{call} ({found[0]}){text[found.end() :]}"
    return text
