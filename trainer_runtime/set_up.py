"""What the set-up of a script fixes that depends on its place: with `State.run` it is not run again in another group.

From `init` until the first step's items are drawn this notes where the script itself reads its rank or the world size,
outside of functions registered with `State.on_regroup`, and the samplers that keep them. Calls by installed packages
are not noted.
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
        self.samplers: WeakSet[DistributedSampler[Any]] = WeakSet()
        self._originals: dict[str, Callable[..., int]] = {}

    def watch(self) -> None:
        """Note from now on."""
        if self._originals:
            return
        for name in _READERS:
            original = self._originals[name] = getattr(dist, name)
            setattr(dist, name, self._noting(original))
        _record_samplers()

    def end(self) -> None:
        """Note no further calls: torch's functions are its own again, as compiled code wants them."""
        while self._originals:
            setattr(dist, *self._originals.popitem())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note no calls within the block."""
        originals, self._originals = self._originals, {}
        yield
        self._originals = originals

    def note_reader(self, above: int = 0) -> None:
        """Note the caller of the function that calls this, or of one `above` that, if it is the script's own code."""
        if not self._originals or self.read_at:
            return
        frame = sys._getframe(2 + above)  # noqa: SLF001 - as `inspect` does
        path = frame.f_code.co_filename
        if not (path.startswith((_OWN, "<", f"{sys.base_prefix}/lib")) or "site-packages" in path):
            self.read_at = f"{Path(path).name}:{frame.f_lineno}"

    def _noting(self, original: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(original)
        def noting(*given: Any, **named: Any) -> int:  # noqa: ANN401 - torch's
            if not torch.compiler.is_compiling():  # a frame cannot be traced
                self.note_reader()
            return original(*given, **named)

        return noting


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
