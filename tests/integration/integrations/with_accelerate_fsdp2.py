"""A tiny program with Accelerate, whose model is sharded."""

from __future__ import annotations

from with_accelerate import main, sharding

if __name__ == "__main__":
    main(sharding)
