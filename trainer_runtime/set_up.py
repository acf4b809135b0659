"""What the set-up of a script fixes that depends on its place: with `State.run` it is not run again in another group.

From `init` until the first step's items are drawn this notes where the script itself reads its rank or the world size,
outside of functions registered with `State.on_regroup`, and the samplers that keep them; and where it takes the process
group, which is another one in the next group. Calls by installed packages are not noted.
"""

from __future__ import annotations

import functools
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_READERS = ("get_rank", "get_world_size")
_OWN = str(Path(__file__).parent)


class _SetUp:
    """Of this process."""

    def __init__(self) -> None:
        self.read_at = ""
        """File and line of the first such call; empty: there was none."""
        self.group_taken_at = ""
        """File and line where the script first took `dist.group.WORLD`; empty: it did not."""
        self.samplers: WeakSet[DistributedSampler[Any]] = WeakSet()
        self._originals: dict[tuple[object, str], object] = {}
        """What was replaced, by what it is an attribute of, and its name."""

    def watch(self) -> None:
        """Note from now on."""
        if self._originals:
            return
        for name in _READERS:
            self._replace(dist, name, self._noting(getattr(dist, name)))
        groups = type(dist.group)  # `WORLD` is a property of this class
        self._replace(groups, "WORLD", self._noting_group(vars(groups)["WORLD"]))
        _record_samplers()

    def end(self) -> None:
        """Note no further calls: torch's functions are its own again, as compiled code wants them."""
        while self._originals:
            (owner, name), original = self._originals.popitem()
            setattr(owner, name, original)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note no calls within the block."""
        originals, self._originals = self._originals, {}
        yield
        self._originals = originals

    def find_obstacle(self) -> str:
        """Return what the set-up has kept that cannot enter another group; empty: nothing is known."""
        if self.group_taken_at:
            return (
                f"the script takes dist.group.WORLD at {self.group_taken_at}, before its steps, and each group has "
                "another one: take it where it is used"
            )
        if self.samplers:
            return "a DistributedSampler keeps the rank and the world size that it was made with; use tr.DataLoader"
        return ""

    def note_reader(self, above: int = 0) -> None:
        """Note the caller of the function that calls this, or of one `above` that, if it is the script's own code."""
        if self._originals and not self.read_at:
            self.read_at = _script_line(3 + above)

    def _replace(self, owner: object, name: str, by: object) -> None:
        self._originals[owner, name] = vars(owner)[name]
        setattr(owner, name, by)

    def _noting_group(self, original: property) -> property:
        def take(cls: type) -> object:
            if self._originals and not self.group_taken_at and not torch.compiler.is_compiling():
                self.group_taken_at = _script_line(2)
            return original.__get__(cls)

        return property(take, original.fset)

    def _noting(self, original: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(original)
        def noting(*given: Any, **named: Any) -> int:  # noqa: ANN401 - torch's
            if not torch.compiler.is_compiling():  # a frame cannot be traced
                self.note_reader()
            return original(*given, **named)

        return noting


def _script_line(above: int) -> str:
    """Return the file and line of a caller, if it is the script's own code; else an empty text."""
    frame = sys._getframe(above)  # noqa: SLF001 - as `inspect` does
    path = frame.f_code.co_filename
    is_own = not (path.startswith((_OWN, "<", f"{sys.base_prefix}/lib")) or "site-packages" in path)
    return f"{Path(path).name}:{frame.f_lineno}" if is_own else ""


set_up = _SetUp()
"""That of this process's script."""


@functools.cache
def _record_samplers() -> None:
    original = DistributedSampler.__init__

    @functools.wraps(original)
    def init(self: DistributedSampler[Any], *given: Any, **named: Any) -> None:  # noqa: ANN401 - torch's
        original(self, *given, **named)
        set_up.samplers.add(self)

    DistributedSampler.__init__ = init  # type: ignore[method-assign]
