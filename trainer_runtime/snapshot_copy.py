"""Copying of a State's storages: what may change at any moment before `commit` returns, the rest during training.

An optimizer's step changes its parameters and the state it keeps for them; usually nothing else changes these. So a
thread may copy them during the next forward and backward passes, and the next optimizer step waits for that thread.
This holds for what belongs to an optimizer in the State. Everything else (values, and buffers, which forward passes
change) is copied before `commit` returns. The checksum is computed after the copy, and no step waits for it.

An optimizer's hook reports its steps. A CUDA graph that contains the step calls no hook when it is replayed. Therefore
only what belongs to an optimizer whose hook was called since the last snapshot is left to the thread, and nothing once
a step was captured.

A script may break the rule and change a parameter by hand. The tensors' version counters show that: the copy is
dropped, and from then on everything is copied before `commit` returns. The counters are compared before the next
optimizer step. A checkpoint that is written from the copy does not wait for that if it comes late, as after an
evaluation: the main thread is asked to compare them as soon as it runs Python code. What is copied for a checkpoint
alone, without an agent or because the script asks for it, is copied at once.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer_runtime.capture.local import is_sharded, local_of
from trainer_runtime.checkpoint import warn
from trainer_runtime.main_thread import call_on_main_thread
from trainer_runtime.snapshot_memory import read_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.utils.hooks import RemovableHandle

    from trainer_runtime.contents import Contents
    from trainer_runtime.flat import Layout
    from trainer_runtime.snapshot_memory import SnapshotMemory, Unfinished

    _Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]
    _Picker = Callable[[Sequence[torch.Tensor]], _Tensors]

LEAST_BYTES = 256 << 10
"""Fewer bytes are copied faster than a thread can be started."""

_MOST_SPLITS = 16
"""Splits that are remembered: with several optimizers, different ones may step each time."""


class ChangedError(Exception):
    """A copy is not what was there at the commit."""


class Capture:
    """A copy of this rank's State in a slot of its memory, which is complete at the latest after the next `join`.

    Args:
        begun: the copy.
        memory: the memory that it is in.
        versions: returns the version counters now of what is to be copied by a thread; None: everything is copied.
    """

    def __init__(
        self, begun: Unfinished, memory: SnapshotMemory, versions: Callable[[], list[int]] | None = None
    ) -> None:
        self.begun = begun
        self._memory = memory
        self._copying: Future[bool] | None = None
        self._is_of_main_thread = threading.current_thread() is threading.main_thread()
        self._is_leased = False
        self._versions = versions or list
        self._versions_then = self._versions()
        # Its `put` may interrupt another one.
        self._verdicts: SimpleQueue[bool] = SimpleQueue()
        if versions is None:
            self._verdicts.put(True)

    def copy_on(self, pool: ThreadPoolExecutor, copy: Callable[[], None]) -> Future[bool]:
        """Let a thread copy the rest; return what tells whether nothing was changed meanwhile."""

        def copy_and_compare() -> bool:
            copy()
            return self.is_unchanged()

        self._copying = pool.submit(copy_and_compare)
        return self._copying

    def lease(self) -> None:
        """Keep the copy as it is until `release`."""
        self._is_leased = True
        self._memory.lease(self.begun)

    def release(self) -> None:
        """Let the copy be replaced. May be called on any thread."""
        self._memory.release(self.begun)

    def read(self) -> tuple[Any, Any]:
        """Wait for the copy; return the common part, or None, and this rank's own part, as views of the memory.

        Called by the thread that writes.
        """
        if self._copying is not None:
            self._copying.result()
        return read_copy(self.begun)

    def require_unchanged(self) -> None:
        """Wait until it is known that nothing was changed while it was copied; ChangedError if something was.

        Called once, by the thread that writes, after `read`.
        """
        self.ask()
        if not self._verdicts.get():
            raise ChangedError(
                "parameters, or what an optimizer keeps of them, were changed other than by an optimizer's step while "
                "they were copied"
            )

    def ask(self) -> None:
        """On a thread, after everything was copied: let the main thread compare, if a checkpoint waits for that."""
        if self._is_leased and self._is_of_main_thread and self._verdicts.empty():
            call_on_main_thread(self._compare)

    def is_unchanged(self) -> bool:
        """Return whether no tensor was changed since the copy began."""
        return self._versions() == self._versions_then

    def settle(self, *, is_right: bool) -> None:
        """Note whether the copy is right; only the first call counts."""
        self._verdicts.put(is_right)

    def _compare(self) -> None:
        """On the main thread, after everything was copied."""
        if self.is_unchanged():
            self._verdicts.put(True)


class SnapshotCopier:
    """Makes one copy after another.

    Args:
        contents: the objects whose optimizers determine what may be copied later.
        memory: memory for the copies.
        report: called with the step of each complete snapshot, possibly on another thread.
    """

    def __init__(self, contents: Contents, memory: SnapshotMemory, report: Callable[[int], None]) -> None:
        self._optimizers = [inner for each in contents.optimizers() if (inner := _hooked_optimizer(each)) is not None]
        self._modules = contents.of_type(nn.Module)
        self._memory = memory
        self._report = report
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")
        self._hooks: list[RemovableHandle] = []
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
        self._newest: Capture | None = None
        self._waited_s = 0.0
        self._began = 0.0
        self.took_s = 0.0
        """Seconds from the beginning of the last snapshot until it was finished."""
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._on_step))

    def copy(self, begun: Unfinished, *, may_defer: bool) -> Capture:
        """Make a copy; if it is a snapshot, finish it when all is copied. `join` comes first.

        Args:
            begun: the copy.
            may_defer: whether what an optimizer changes is copied by a thread.
        """
        self._began = time.monotonic()
        all_sources = [*begun.part.sources, *begun.common.sources]
        all_targets = [*begun.part.targets, *begun.common.targets]
        if not may_defer:
            _copy(all_sources, all_targets)
            return Capture(begun, self._memory)
        split = self._split_up(begun.part.layout, begun.common.layout)
        self._stepped.clear()
        _copy(split.now(all_sources), split.now(all_targets))
        if not split.tensors:
            self._finish(begun)
            return Capture(begun, self._memory)
        sources, targets = split.later(all_sources), split.later(all_targets)
        self._newest = newest = Capture(begun, self._memory, partial(_versions, split.tensors))
        copy_later = partial(self._copy_later, begun, sources, targets, _record_events(split.gpus))
        self._copying = copying = newest.copy_on(self._pool, copy_later)
        self._finishing = self._pool.submit(self._finish_later, newest, copying)
        return newest

    @property
    def is_copying(self) -> bool:
        """Whether a thread may be copying, so that training waits for it before it changes something."""
        return self._copying is not None

    def join(self) -> None:
        """Wait until the last snapshot is finished or dropped."""
        self._join_copying()
        if self._finishing is not None:
            self._wait(self._finishing)
            self._finishing = None

    def close(self) -> None:
        """Make no further copies; `join` comes first."""
        for hook in self._hooks:
            hook.remove()
        self._pool.shutdown(wait=False)

    def _join_copying(self) -> None:
        """Wait until nothing is being copied, so that tensors may be changed."""
        copying, newest = self._copying, self._newest
        if copying is None or newest is None:
            return
        began = time.monotonic()
        wait([copying])
        self._waited_s += time.monotonic() - began
        if self._copying is not copying:
            return  # a signal's handler has done all of this meanwhile
        self._copying = self._newest = None
        if error := copying.exception():
            self._finishing = None  # it would raise the same error again
            newest.settle(is_right=False)
            raise error
        is_right = newest.is_unchanged()
        newest.settle(is_right=is_right)
        if is_right:
            return
        finishing, self._finishing = self._finishing, None
        if finishing is not None and self._wait(finishing):
            self._memory.revoke(newest.begun)
        self._defer_no_more()
        warn(
            "parameters, or what an optimizer keeps of them, were changed other than by an optimizer's step, so a copy "
            "of them was dropped; from now on they are copied before commit() returns, which takes longer"
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
    ) -> None:
        """On the thread: copy the rest."""
        if events:
            torch.cuda.set_device(events[0].device)  # else this thread would take memory on the first GPU
            self._memory.pin(begun, events[0].device)
            _copy_on_streams(sources, targets, events)
        else:
            _copy(sources, targets)

    def _finish_later(self, newest: Capture, copying: Future[bool]) -> bool:
        """On the thread, after the copy: finish a snapshot if it is right; return whether it is."""
        if not copying.result():
            return False
        newest.ask()
        self._finish(newest.begun)
        return True

    def _finish(self, begun: Unfinished) -> None:
        if begun.is_snapshot:
            self._memory.finish(begun)
            self.took_s = time.monotonic() - self._began
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

    A change may count up the version of either of the two. ZeRO 3 gives an optimizer its parameters for the step only;
    between the steps the state has them.
    """
    in_groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    in_state = [each for each in optimizer.state if isinstance(each, torch.Tensor)]
    parameters = [*dict.fromkeys([*in_groups, *in_state])]
    states = (value for parameter in parameters for value in optimizer.state.get(parameter, {}).values())
    tensors = [*parameters, *(value for value in states if isinstance(value, torch.Tensor))]
    return [*tensors, *(local_of(tensor) for tensor in tensors if is_sharded(tensor))]


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {_storage(tensor) for tensor in tensors if tensor.layout is torch.strided}  # a sparse tensor has none


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - a data pointer may belong to any device


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]  # noqa: SLF001 - no public name
