"""What a step takes this rank itself, without waiting for others: by that a slow rank is told from those it holds up.

All ranks of a DistributedDataParallel module take a step in the same time, the slowest one's. Where they wait for each
other is known, so that a stopwatch can be halted there:

- at the end of the backward pass, from when the last gradient is there until all are summed up. Both ends show in the
  autograd engine's callbacks: those queued while gradients come run before DDP's own, which waits, and what is queued
  from there runs after it.
- at the beginning of the forward pass, if buffers are sent from rank 0: between DDP's forward and its module's.

It is the time of this process. On a GPU the waiting is done by the device, and what is measured here says little: there
the host's part is told, reading data for instance. A wait in a collective that the script calls itself is not known
for one. Where buffers are sent and torch.compile traces the module, nothing is told: the hooks would be in its way.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from trainer_runtime import phases
from trainer_runtime.dist import open_control_page

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainer_runtime.contract import ControlPage

_US = 1_000_000


class Stopwatch:
    """Adds up this rank's own time on its page, from the end of its first backward pass on."""

    def __init__(self, page: ControlPage) -> None:
        self._page = page
        self._own_s = page.own_us / _US
        self._since: float | None = None
        """None: it stands."""
        self._has_begun = False
        self._away_s = 0.0

    def watch(self, module: DistributedDataParallel) -> None:
        """Halt where this module waits for other ranks."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter in {trained[0], trained[-1]}:  # one of them has a part in every backward pass, most likely
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
        if _sends_buffers(module):
            module.register_forward_pre_hook(self._halt)
            module.module.register_forward_pre_hook(self._go)

    def _halt(self, *_: object) -> None:
        if self._since is None:
            return
        self._own_s += time.monotonic() - self._since - (phases.away_s() - self._away_s)
        self._since = None
        self._page.own_us = int(self._own_s * _US)

    def _go(self, *_: object) -> None:
        if self._has_begun:
            self._since, self._away_s = time.monotonic(), phases.away_s()

    def _on_gradient(self, _parameter: object) -> None:
        Variable._execution_engine.queue_callback(self._on_last_gradient)  # noqa: SLF001 - it has no other name

    def _on_last_gradient(self) -> None:
        self._halt()
        self._has_begun = True
        Variable._execution_engine.queue_callback(self._go)  # noqa: SLF001 - as above


def watch_own_time(modules: Iterable[nn.Module]) -> None:
    """Tell the agent what the steps of these modules take this rank itself; nothing where none is a DDP module."""
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
