"""How many collectives this rank has begun that are not finished, by torch's flight recorder.

With NCCL a rank waits where it needs a result, `loss.item()` for instance: its stack does not show that it waits for
another rank. The recorder does: a rank that waits has begun a collective that another rank has not. Torch records by
default (`TORCH_FR_BUFFER_SIZE`), for NCCL and gloo; its fields: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any


def count_unfinished() -> int | None:
    """Return how many collectives are unfinished; None: not known. Sends and receives between two ranks do not count.

    A rank may have asked for them long before it needs them.
    """
    torch_c10d = sys.modules.get("torch._C._distributed_c10d")
    dump: Callable[[bool, bool], bytes] | None = getattr(torch_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return None
    try:
        entries: list[Mapping[str, Any]] = json.loads(dump(True, False)).get("entries", [])
        unfinished = [each for each in entries if not each.get("retired", True) and not each.get("is_p2p", False)]
    except (AttributeError, ValueError, TypeError, RuntimeError):  # another version's form
        return None
    return len(unfinished) if entries else None
