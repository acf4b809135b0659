"""This rank's own time per step, without waits for other ranks; it distinguishes a slow rank from those it delays.

All ranks of a DistributedDataParallel module take the same time for a step, that of the slowest rank. The places where
they wait for each other are known, so a stopwatch can be stopped there:

- at the end of the backward pass, from the last gradient until all gradients are reduced. The autograd engine's
  callbacks mark both ends: callbacks queued while gradients arrive run before DDP's own callback, which waits; a
  callback queued by one of these runs after it.
- at the beginning of the forward pass, if buffers are broadcast from rank 0: between DDP's forward and its module's.

The time measured is that of this process. On a GPU the device does the waiting, so the measured time covers only the
host's part, reading data for instance. A wait in a collective that the script calls itself is counted as own time. If
buffers are broadcast and torch.compile traces the module, nothing is measured, because hooks would break the tracing.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from trainer_runtime import phases
from trainer_runtime.dist import open_control_page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trainer_runtime.contract import ControlPage

_US = 1_000_000


class Stopwatch:
    """Adds up this rank's own time on its control page, from the end of its first backward pass on."""

    def __init__(self, page: ControlPage) -> None:
        self._page = page
        self._own_s = page.own_us / _US
        self._since: float | None = None
        """Monotonic time since which the stopwatch runs; None: it is stopped."""
        self._has_begun = False
        self._away_s = 0.0

    def watch(self, module: DistributedDataParallel) -> None:
        """Stop the clock where this module waits for other ranks."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter in {trained[0], trained[-1]}:  # most likely, every backward pass uses one of them
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
        if _sends_buffers(module):
            module.register_forward_pre_hook(_Hook(self._stop))
            module.module.register_forward_pre_hook(_Hook(self._start))

    def _stop(self) -> None:
        if self._since is None:
            return
        self._own_s += time.monotonic() - self._since - (phases.phase_time_s() - self._away_s)
        self._since = None
        self._page.own_us = int(self._own_s * _US)

    def _start(self) -> None:
        if self._has_begun:
            self._since, self._away_s = time.monotonic(), phases.phase_time_s()

    def _on_gradient(self, _parameter: object) -> None:
        Variable._execution_engine.queue_callback(self._on_last_gradient)  # noqa: SLF001 - no public name

    def _on_last_gradient(self) -> None:
        self._stop()
        self._has_begun = True
        Variable._execution_engine.queue_callback(self._start)  # noqa: SLF001 - as above


class _Hook:
    """A hook of which copies of its module are free: those of `deepcopy`, and pickled ones, for any process."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, *_: object) -> None:
        self._call()

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, str]]:
        return getattr, (nullcontext(), "__exit__")  # it takes anything and does nothing


def watch_own_time(modules: Iterable[nn.Module]) -> None:
    """Report this rank's own time in the steps of these modules to the agent; nothing if none is a DDP module."""
    found = [each for module in modules for each in module.modules() if isinstance(each, DistributedDataParallel)]
    if not found or any(_sends_buffers(each) and _is_compiled(modules) for each in found):
        return
    page = open_control_page()
    if page is None:
        return
    stopwatch = Stopwatch(page)
    for each in found:
        stopwatch.watch(each)


def _sends_buffers(module: DistributedDataParallel) -> bool:
    return module.broadcast_buffers and any(True for _ in module.buffers())


def _is_compiled(modules: Iterable[nn.Module]) -> bool:
    return any(hasattr(each, "_orig_mod") for module in modules for each in module.modules())
