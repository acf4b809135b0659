"""The banner of Paddle's launcher: the agent's arguments, and the environment of the first rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_TITLE = "-----------  Configuration Arguments -----------"
_WIDTH = 87
_NAME_WIDTH = 42
_ENDPOINT_CHARACTERS = 41
_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"),
    *("PADDLE_CURRENT_ENDPOINT", "PADDLE_TRAINERS_NUM", "FLAGS_selected_gpus", "PADDLE_TRAINER_ENDPOINTS"),
    "PADDLE_TRAINER_ID",
)


def arguments(given: Mapping[str, object]) -> str:
    """Return the arguments, one per line, sorted by name."""
    lines = [f"{name}: {value}" for name, value in sorted(given.items())]
    return "\n".join([_TITLE, *lines, "-" * len(_TITLE)])


def first_process(envs: Sequence[Mapping[str, str]]) -> str:
    """Return the number of this node's ranks and a table of the first rank's environment variables."""
    count = f"{len(envs)} process" if len(envs) == 1 else f"{len(envs)} processes"
    rows = [(name, _shortened(envs[0][name])) for name in _VARIABLES if name in envs[0]]
    return "\n".join(
        [
            f"Local start {count}. First process distributed environment info (Only For Debug):",
            "=" * _WIDTH,
            f"{'Distributed Envs':>28}{'Value':>19}",
            "-" * _WIDTH,
            *(f"{name:<{_NAME_WIDTH}}{value}" for name, value in rows),
            "=" * _WIDTH,
        ]
    )


def _shortened(value: str) -> str:
    """Return a value of bounded length: the end of a long list, where nodes differ."""
    return value if len(value) <= _ENDPOINT_CHARACTERS else f"... {value[-_ENDPOINT_CHARACTERS:]}"
