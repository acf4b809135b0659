"""Copying of a snapshot's storages: what may change at any moment before `commit` returns, the rest during training.

An optimizer's step changes its parameters and the state it keeps for them; usually nothing else changes these. So a
thread may copy them during the next forward and backward passes, and the next optimizer step waits for that thread.
This holds for what belongs to an optimizer in the State. Everything else (values, and buffers, which forward passes
change) is copied before `commit` returns. The checksum is computed after the copy, and no step waits for it.

An optimizer's hook reports its steps. A CUDA graph that contains the step calls no hook when it is replayed. Therefore
only what belongs to an optimizer whose hook was called since the last snapshot is left to the thread, and nothing once
a step was captured.

A script may break the rule and change a parameter by hand. The tensors' version counters show that: the snapshot is
dropped, and from then on everything is copied before `commit` returns.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from trainer_runtime.capture.local import is_sharded, local_of
from trainer_runtime.checkpoint import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from trainer_runtime.contents import Contents
    from trainer_runtime.flat import Layout
    from trainer_runtime.snapshot_memory import SnapshotMemory, Unfinished

    _Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]
    _Picker = Callable[[Sequence[torch.Tensor]], _Tensors]

LEAST_BYTES = 256 << 10
"""Fewer bytes are copied faster than a thread can be started."""

_MOST_SPLITS = 16
"""Splits that are remembered: with several optimizers, different ones may step each time."""


class SnapshotCopier:
    """Copies one snapshot after another.

    Args:
        contents: the objects whose optimizers determine what may be copied later.
        memory: memory for the snapshots.
        report: called with the step of each complete snapshot, possibly on another thread.
    """

    def __init__(self, contents: Contents, memory: SnapshotMemory, report: Callable[[int], None]) -> None:
        self._optimizers = [
            inner for each in contents.of_type(Optimizer) if (inner := _hooked_optimizer(each)) is not None
        ]
        self._modules = contents.of_type(nn.Module)
        self._memory = memory
        self._report = report
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")
        self._copying: Future[bool] | None = None
        """Tells whether nothing was changed while it was copied."""
        self._finishing: Future[bool] | None = None
        """Tells whether the snapshot was finished."""
        self._may_defer = True
        self._stepped: set[Optimizer] = set()
        """Optimizers that have stepped since the last snapshot."""
        self._layouts: tuple[Layout | None, ...] = ()
        self._splits: dict[frozenset[Optimizer], _Split] = {}
        """Splits of these layouts, by the optimizers that have stepped."""
        self._tensors: list[torch.Tensor] = []
        """Tensors that must not change while they are copied; `_versions` has their version counters at the commit."""
        self._versions: list[int] = []
        self._waited_s = 0.0
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(self._on_step)

    def copy(self, begun: Unfinished) -> None:
        """Copy a snapshot, and finish it when all is copied."""
        all_sources = [*begun.part.sources, *begun.common.sources]
        all_targets = [*begun.part.targets, *begun.common.targets]
        split = self._split_up(begun.part.layout, begun.common.layout)
        self._stepped.clear()
        _copy(split.now(all_sources), split.now(all_targets))
        if not split.tensors:
            self._finish(begun)
            return
        sources, targets = split.later(all_sources), split.later(all_targets)
        self._tensors, self._versions = split.tensors, _versions(split.tensors)
        self._copying = self._pool.submit(self._copy_later, begun, sources, targets, _record_events(split.gpus))
        self._finishing = self._pool.submit(self._finish_later, begun, self._copying)

    def join(self) -> None:
        """Wait until the last snapshot is finished or dropped."""
        self._join_copying()
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            self._wait(finishing)

    def _join_copying(self) -> None:
        """Wait until nothing is being copied, so that tensors may be changed."""
        copying, self._copying = self._copying, None
        if copying is None:
            return
        try:
            self._wait(copying)
        except BaseException:
            self._finishing = None  # it would raise the same error again
            raise
        if _versions(self._tensors) == self._versions:
            return
        finishing, self._finishing = self._finishing, None
        if finishing is not None and self._wait(finishing):
            self._memory.revoke()
        self._defer_no_more()
        warn(
            "parameters, or what an optimizer keeps of them, were changed other than by an optimizer's step, so a "
            "snapshot was dropped; from now on they are copied before commit() returns, which takes longer"
        )

    def _wait(self, future: Future[bool]) -> bool:
        began = time.monotonic()
        result = future.result()
        self._waited_s += time.monotonic() - began
        return result

    def take_waited_s(self) -> float:
        """Return the seconds that training has waited for the thread since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _on_step(self, optimizer: Optimizer, *_: object) -> None:
        """Wait for the copy, and note that this optimizer is about to step.

        A captured step is not executed now but whenever the graph is replayed, possibly at once.
        """
        self._join_copying()
        self._stepped.add(optimizer)
        if _is_capturing():
            self._defer_no_more()

    def _defer_no_more(self) -> None:
        self._may_defer = False
        self._splits.clear()

    def _split_up(self, *layouts: Layout | None) -> _Split:
        if [*map(id, layouts)] != [*map(id, self._layouts)] or len(self._splits) == _MOST_SPLITS:
            self._layouts = layouts
            self._splits.clear()
        stepped = frozenset(self._stepped)
        split = self._splits.get(stepped)
        if split is None:
            sources = [source for layout in layouts if layout is not None for source in layout.sources]
            split = self._splits[stepped] = self._choose(sources, stepped)
        return split

    def _choose(self, sources: list[torch.Tensor], stepped: frozenset[Optimizer]) -> _Split:
        optimizers = self._optimizers if self._may_defer else []
        tensors = [tensor for optimizer in optimizers if optimizer in stepped for tensor in _changed_by(optimizer)]
        changed = _storages(tensors)
        kept = _storages(buffer for module in self._modules for buffer in module.buffers())
        kept |= _storages(tensor for each in optimizers if each not in stepped for tensor in _changed_by(each))
        later = [index for index, source in enumerate(sources) if _storage(source) in changed - kept]
        is_worth_it = sum(len(sources[index]) for index in later) >= LEAST_BYTES
        return _split(sources, set(later) if is_worth_it else set(), tensors)

    def _copy_later(
        self,
        begun: Unfinished,
        sources: _Tensors,
        targets: _Tensors,
        events: list[torch.cuda.Event],
    ) -> bool:
        """On the thread: copy the rest; return whether nothing was changed meanwhile."""
        if events:
            torch.cuda.set_device(events[0].device)  # else this thread would take memory on the first GPU
            self._memory.pin(begun, events[0].device)
            _copy_on_streams(sources, targets, events)
        else:
            _copy(sources, targets)
        return _versions(self._tensors) == self._versions

    def _finish_later(self, begun: Unfinished, copying: Future[bool]) -> bool:
        """On the thread, after the copy: finish the snapshot if it is right; return whether it is."""
        if not copying.result():
            return False
        self._finish(begun)
        return True

    def _finish(self, begun: Unfinished) -> None:
        self._memory.finish(begun)
        self._report(begun.step)


@dataclass(frozen=True, slots=True)
class _Split:
    """Which sources are copied at once, and which later."""

    now: _Picker
    later: _Picker
    gpus: list[torch.device]
    """The GPUs with sources that are copied later."""
    tensors: list[torch.Tensor]
    """The tensors that the optimizers change; empty if nothing is copied later."""


def _split(sources: list[torch.Tensor], later: set[int], tensors: list[torch.Tensor]) -> _Split:
    now = [index for index in range(len(sources)) if index not in later]
    gpus = list(dict.fromkeys(sources[index].device for index in sorted(later) if sources[index].is_cuda))
    return _Split(_picker(now), _picker(sorted(later)), gpus, tensors if later else [])


def _copy(sources: _Tensors, targets: _Tensors) -> None:
    if sources:
        torch._foreach_copy_(targets, sources)


def _copy_on_streams(sources: _Tensors, targets: _Tensors, events: list[torch.cuda.Event]) -> None:
    """Copy from GPUs, once each has reached its event, and wait for that: a source is copied on its GPU's stream."""
    with ExitStack() as stack:
        streams = [torch.cuda.Stream(event.device) for event in events]  # type: ignore[no-untyped-call]
        for event, stream in zip(events, streams, strict=True):
            stack.enter_context(torch.cuda.stream(stream))
            event.wait(stream)
        torch._foreach_copy_(targets, sources, non_blocking=True)
        for stream in streams:
            stream.synchronize()


def _record_events(devices: list[torch.device]) -> list[torch.cuda.Event]:
    """Return events that these GPUs reach after all work submitted until now."""
    return [torch.cuda.current_stream(device).record_event() for device in devices]


def _is_capturing() -> bool:
    """Return whether this thread's GPU work is being captured into a CUDA graph; does not initialize CUDA."""
    has_begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(has_begun and torch.cuda.is_current_stream_capturing())


def _picker(indices: list[int]) -> _Picker:
    """Return a function that picks these indices from a list, in C if there are many."""
    return itemgetter(*indices) if len(indices) > 1 else lambda listed: [listed[index] for index in indices]


def _hooked_optimizer(optimizer: Optimizer) -> Optimizer | None:
    """Return the optimizer with step hooks: this one or the one that it wraps (as Accelerate's does), or None."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            return None
        optimizer = inner
    return optimizer


def _changed_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the tensors that the optimizer's step changes, sharded ones with the local tensors in them.

    A change may count up the version of either of the two.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = (value for parameter in parameters for value in optimizer.state.get(parameter, {}).values())
    tensors = [*parameters, *(value for value in states if isinstance(value, torch.Tensor))]
    return [*tensors, *(local_of(tensor) for tensor in tensors if is_sharded(tensor))]


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {_storage(tensor) for tensor in tensors if tensor.layout is torch.strided}  # a sparse tensor has none


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - a data pointer may belong to any device


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]  # noqa: SLF001 - no public name
