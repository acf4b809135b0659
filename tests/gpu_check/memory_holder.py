"""Hold GPU memory until killed: `memory_holder.py GIGABYTES`. Prints a line once all of it is written."""

from __future__ import annotations

import sys

import torch


def main() -> None:
    """Hold it."""
    chunk = torch.empty(10**9 // 4, device="cuda").fill_(1.0)
    held = [chunk, *(chunk.clone() for _ in range(int(sys.argv[1]) - 1))]
    torch.cuda.synchronize()
    print(len(held), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
