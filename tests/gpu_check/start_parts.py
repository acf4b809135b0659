"""How long the parts of a start take, as JSON; then wait, so that the memory of the context can be measured."""

from __future__ import annotations

import itertools
import json
import sys
import time


def main() -> None:
    """Measure."""
    at = [time.perf_counter()]
    import torch  # noqa: PLC0415 - it is what is measured

    at.append(time.perf_counter())
    torch.zeros(1, device="cuda").item()
    at.append(time.perf_counter())
    ones = torch.ones(64, 64, device="cuda")
    (ones @ ones).sum().item()
    at.append(time.perf_counter())
    names = ("import_s", "context_s", "cublas_s")
    print(json.dumps(dict(zip(names, (b - a for a, b in itertools.pairwise(at)), strict=True))), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
