"""The recorder: in a rank's process it records the state in which each training step begins, one JSON line per step.

A line is written before the first optimizer changes anything. So everything in it is the state in which the step began,
except for the inputs, the loss and the random states. A difference in the first line after a restart is therefore a
cause and not a consequence.

A script may have several optimizers. With a State, a training step is the time from one commit to the next. Without a
State, it begins with each step of the optimizer that made the first one; this is the same optimizer after a restart.
Each step of an optimizer ends a part of the training step. The first part is in the step's line, the others are added
as further lines.

The recorder also holds the script at the step that the rehearsal names, so that a fault comes at the intended step.
Errors of the recorder are logged to a file and never reach the script.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import time
import traceback
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from agent.rehearse.fingerprints import Fingerprints, parameters_of
from agent.rehearse.live_objects import LiveObjects, TrackedObject, epoch_in, names_in
from agent.rehearse.overwrites import OverwriteMonitor
from agent.rehearse.startup import when_imported
from agent.rehearse.step_gate import read_gate
from agent.rehearse.tensor_owners import TensorOwners

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agent.rehearse.seeding import Seeding

_POLL_S = 0.005
_HELD_AT_MOST_S = 90.0
"""Limit in case the rehearsal has ended and cannot open the gate any more."""


class StepRecorder:
    """Records the steps of one rank in one group.

    Args:
        torch: the imported module.
        directory: of the records and the gate.
        rank: of this process.
        group: number of its group.
        seeding: the seeding of this process.
    """

    def __init__(self, torch: Any, directory: Path, rank: int, group: int, seeding: Seeding) -> None:  # noqa: ANN401
        self._torch = torch
        self._directory = directory
        self._group = group
        self._path = directory / f"group-{group:06d}.rank-{rank:05d}.jsonl"
        self._fingerprints = Fingerprints(torch)
        self._objects = LiveObjects(torch)
        self._owners = TensorOwners(torch)
        self._seeding = seeding
        self._overwrites = OverwriteMonitor(directory, lambda: read_gate(directory).kill_on_write)
        self._count = 0
        self._primary: Any = None
        self._module = ""
        self._is_recorded = False
        """Whether the line of the current step is written."""
        self._begin_part()

    def install(self) -> None:
        """Install all hooks."""
        torch = self._torch
        warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")  # from torch.compile
        self._objects.watch()
        self._owners.watch()
        self._overwrites.watch(torch)
        when_imported("trainer_runtime.state", self._follow_states)
        sys.modules["torch.optim.optimizer"].register_optimizer_step_pre_hook(self._before_optimizer)
        torch.nn.modules.module.register_module_forward_pre_hook(self._before_forward)
        self._wrap(torch.Tensor, "backward", self._before_backward)
        self._wrap(torch.amp.GradScaler, "step", after=self._after_scaler)
        scale = torch.amp.GradScaler.scale

        @functools.wraps(scale)
        def scale_and_remember(scaler: Any, outputs: Any) -> Any:  # noqa: ANN401 - torch's
            scaled = scale(scaler, outputs)
            if isinstance(scaled, torch.Tensor):
                scaled._unscaled_loss = outputs.detach()  # noqa: SLF001 - an attribute of ours
            return scaled

        torch.amp.GradScaler.scale = scale_and_remember

    def _follow_states(self, module: Any) -> None:  # noqa: ANN401 - trainer_runtime.state
        self._objects.watch_class(module.State, "state")
        self._wrap(module.State, "commit", self._before_commit)

    def _wrap(
        self,
        owner: Any,  # noqa: ANN401 - a class of torch's
        name: str,
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
    ) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
            if before is not None:
                before(*args)
            result = original(*args, **kwargs)
            if after is not None:
                after(*args)
            return result

        setattr(owner, name, wrapped)

    def _begin_part(self) -> None:
        """Begin a new part: what is computed for the next step of an optimizer."""
        self._losses: list[float | None] = []
        self._inputs: list[str] = []
        self._rows: list[str] = []
        self._buffers = ""
        self._owner_records: list[dict[str, Any]] | None = None
        """The tensor owners before the first forward pass."""
        self._awaits_forward = True

    def _before_forward(self, module: Any, args: tuple[Any, ...]) -> None:  # noqa: ANN401 - torch's
        """Record the inputs of the outermost module: the first that is called after a backward pass."""
        if not self._awaits_forward or not self._torch.is_grad_enabled() or not self._fingerprints.has_tensor(args):
            return
        if not self._objects.has("optimizer"):  # training has not begun
            return
        self._awaits_forward = False
        frame = sys._getframe(1)  # noqa: SLF001 - the script's variables
        with _log_errors(self._directory):
            if not self._module:
                self._module = names_in(frame).get(id(module), "")
            if not self._inputs:
                self._buffers = self._fingerprints.of(*module.buffers())
                self._owner_records = self._describe_owners(
                    frame, [*module.buffers(), *self._fingerprints.tensors_in(args)]
                )
            self._inputs.append(self._fingerprints.of(args))
            self._rows += self._fingerprints.of_rows(args)

    def _before_backward(self, loss: Any, *_args: object) -> None:  # noqa: ANN401 - torch's
        self._awaits_forward = True
        with _log_errors(self._directory):
            plain = getattr(loss, "_unscaled_loss", loss).detach()
            value = float(plain.sum())
            self._losses.append(value if math.isfinite(value) else None)

    def _before_optimizer(self, optimizer: Any, _args: object, _kwargs: object) -> None:  # noqa: ANN401 - torch's
        self._end_part(optimizer, sys._getframe(1))  # noqa: SLF001 - the script's variables

    def _after_scaler(self, _scaler: object, optimizer: Any, *_args: object) -> None:  # noqa: ANN401 - torch's
        """Count a step that the scaler skipped because of infinite gradients."""
        if self._losses:
            self._end_part(optimizer, sys._getframe(1))  # noqa: SLF001 - as above

    def _before_commit(self, *_args: object) -> None:
        """End the training step."""
        if self._is_recorded:
            self._write_late(is_complete=True)
        self._is_recorded = False
        self._begin_part()

    def _end_part(self, optimizer: Any, frame: FrameType) -> None:  # noqa: ANN401 - torch's
        if _is_within_checkpointing(frame):
            return
        if self._primary is None:
            self._primary = optimizer
        is_new = not self._is_recorded if self._objects.has("state") else optimizer is self._primary
        if not is_new:
            self._write_late(is_complete=False)
            self._begin_part()
            return
        self._is_recorded = True
        self._count += 1
        with _log_errors(self._directory):
            self._write(frame)
        self._begin_part()
        with _log_errors(self._directory):
            self._wait_at_gate()

    def _write(self, frame: FrameType) -> None:
        self._objects.update(frame)
        states, epoch = self._objects.states, epoch_in(frame)
        owner_records = self._describe_owners(frame, []) if self._owner_records is None else self._owner_records
        self._append(
            {
                "type": "step",
                "count": self._count,
                "step": states[0].step + 1 if states else None,
                "state_epoch": states[0].epoch if states else None,
                "epoch": epoch[1] if epoch else None,
                "epoch_name": epoch[0] if epoch else "",
                "world": int(os.environ["WORLD_SIZE"]),
                "losses": self._losses,
                "inputs": self._inputs,
                "rows": self._rows,
                "weights": self._fingerprints.of([parameters_of(each) for each in self._objects.optimizers()]),
                "buffers": self._buffers,
                "random": self._fingerprints.of_random_states(),
                "objects": [found for each in self._objects.tracked if (found := self._describe(each)) is not None]
                + owner_records,
                "model": self._module,
                "models": self._owners.trained,
                "seeded": self._seeding.in_use(),
                "read": list(self._overwrites.read) if self._count == 1 else [],
                "overwritten": list(self._overwrites.overwritten),
            }
        )

    def _write_late(self, *, is_complete: bool) -> None:
        if is_complete or self._losses or self._inputs:
            with _log_errors(self._directory):
                self._append(
                    {"type": "late", "losses": self._losses, "inputs": self._inputs, "is_complete": is_complete}
                )

    def _append(self, record: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _describe_owners(self, frame: FrameType, excluded: list[Any]) -> list[dict[str, Any]]:
        """Describe the tensor owners, without the weights and the excluded tensors."""
        records: list[dict[str, Any]] = []
        with _log_errors(self._directory):
            self._objects.update(frame)
            others = [value for each in self._objects.tracked if (value := each.ref()) is not None]
            weights = [weight for each in self._objects.optimizers() for weight in parameters_of(each)]
            for each in self._owners.find(frame, self._objects.states, others, weights + excluded):
                described = {"kind": each.kind, "type": each.type, "name": each.name, "is_in_state": each.is_in_state}
                records.append(
                    {**described, "digest": self._fingerprints.of(each.tensors), "is_persistent": each.is_persistent}
                )
        return records

    def _describe(self, tracked: TrackedObject) -> dict[str, Any] | None:
        value = tracked.ref()
        if value is None:
            return None
        if tracked.kind == "optimizer":
            digest = self._fingerprints.of_optimizer(value)
        elif tracked.kind == "generator":
            digest = self._fingerprints.of(value.get_state())
        else:
            digest = self._fingerprints.of(value.state_dict())
        label = "Generator" if tracked.kind == "generator" else type(value).__name__
        return {
            "kind": tracked.kind,
            "type": label,
            "name": tracked.name,
            "is_in_state": tracked.is_in_state,
            "digest": digest,
        }

    def _wait_at_gate(self) -> None:
        """Hold the script here until the gate lets it continue."""
        until = time.monotonic() + _HELD_AT_MOST_S
        while (gate := read_gate(self._directory)).holds(self._group, self._count) and time.monotonic() < until:
            time.sleep(_POLL_S)
        if delay_s := gate.delay_at(self._group, self._count):
            time.sleep(delay_s)


def _is_within_checkpointing(frame: FrameType | None) -> bool:
    """Return whether torch makes this step only to create an optimizer's state, as `get_state_dict` does before a load.

    Such a step has gradients of zero, but a training step may have them too, so the caller is looked at
    (`_init_optim_state` in torch.distributed.checkpoint.state_dict, torch 2.3 to 2.13).
    """
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint."):
            return True
        frame = frame.f_back
    return False


@contextmanager
def _log_errors(directory: Path) -> Iterator[None]:
    """Log errors of the recorder to a file, and continue."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the script must not fail because of it
        with suppress(OSError), (directory / "recorder-errors.txt").open("a", encoding="utf-8") as file:
            file.write("".join(traceback.format_exception(error)))
