"""Records in a rank's process what each step of the training began with: one line of JSON per step.

A line is written before the first optimizer changes anything, so all in it but the inputs, the loss and the random
states is what the step began with. After a restart, what differs there in the first line is a cause and no consequence.

A script may have several optimizers. With a State, a step of the training goes from one commit to the next. Without
one, it begins with each step of the optimizer that was the first to make one, which is the same after a restart. A step
of an optimizer ends what was computed for it; what the other optimizers compute is added to the line as it comes.

The recorder also holds the script at a step that the rehearsal names, so that a fault falls where it was meant to. An
error of the recorder's own is noted in a file and never reaches the script.
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
from agent.rehearse.live_objects import KnownObject, LiveObjects, epoch_in, names_in
from agent.rehearse.overwriting import Overwriting
from agent.rehearse.startup import when_imported
from agent.rehearse.step_gate import read_gate
from agent.rehearse.tensor_owners import TensorOwners

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agent.rehearse.seeding import Seeding

_POLL_S = 0.005
_HELD_AT_MOST_S = 90.0
"""If the rehearsal is gone, nobody else lets the script go on."""


class StepRecorder:
    """Follows one rank of one group.

    Args:
        torch: the imported module.
        directory: for the records; holds the gate.
        rank: of this process.
        group: number of its group.
        seeding: what this process was seeded with.
    """

    def __init__(self, torch: Any, directory: Path, rank: int, group: int, seeding: Seeding) -> None:  # noqa: ANN401
        self._torch = torch
        self._directory = directory
        self._group = group
        self._path = directory / f"group-{group:06d}.rank-{rank:05d}.jsonl"
        self._prints = Fingerprints(torch)
        self._living = LiveObjects(torch)
        self._keepers = TensorOwners(torch)
        self._seeding = seeding
        self._files = Overwriting(directory, lambda: read_gate(directory).torn)
        self._count = 0
        self._primary: Any = None
        self._module = ""
        self._has_begun = False
        """Whether the present step's line is written."""
        self._forget()

    def install(self) -> None:
        """Put the hooks in place."""
        torch = self._torch
        warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")  # of torch.compile
        self._living.watch()
        self._keepers.watch()
        self._files.watch(torch)
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
                scaled._unscaled_loss = outputs.detach()  # noqa: SLF001 - our own mark on it
            return scaled

        torch.amp.GradScaler.scale = scale_and_remember

    def _follow_states(self, module: Any) -> None:  # noqa: ANN401 - trainer_runtime.state
        self._living.watch_class(module.State, "state")
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

    def _forget(self) -> None:
        """Begin with what is computed for the next step of an optimizer."""
        self._losses: list[float | None] = []
        self._inputs: list[str] = []
        self._rows: list[str] = []
        self._buffers = ""
        self._kept: list[dict[str, Any]] | None = None
        """What keeps tensors, as it was before the first forward pass."""
        self._is_between = True

    def _before_forward(self, module: Any, args: tuple[Any, ...]) -> None:  # noqa: ANN401 - torch's
        """Note the inputs of the outermost module: the first that is called after a backward pass."""
        if not self._is_between or not self._torch.is_grad_enabled() or not self._prints.has_tensor(args):
            return
        if not self._living.has("optimizer"):  # it is not training yet
            return
        self._is_between = False
        frame = sys._getframe(1)  # noqa: SLF001 - the script's variables
        with _noted(self._directory):
            if not self._module:
                self._module = names_in(frame).get(id(module), "")
            if not self._inputs:
                self._buffers = self._prints.of(*module.buffers())
                self._kept = self._look_at_keepers(frame, [*module.buffers(), *self._prints.tensors_in(args)])
            self._inputs.append(self._prints.of(args))
            self._rows += self._prints.of_rows(args)

    def _before_backward(self, loss: Any, *_args: object) -> None:  # noqa: ANN401 - torch's
        self._is_between = True
        with _noted(self._directory):
            plain = getattr(loss, "_unscaled_loss", loss).detach()
            value = float(plain.sum())
            self._losses.append(value if math.isfinite(value) else None)

    def _before_optimizer(self, optimizer: Any, _args: object, _kwargs: object) -> None:  # noqa: ANN401 - torch's
        """An optimizer is about to step."""
        self._end_part(optimizer, sys._getframe(1))  # noqa: SLF001 - the script's variables

    def _after_scaler(self, _scaler: object, optimizer: Any, *_args: object) -> None:  # noqa: ANN401 - torch's
        """A scaler leaves a step out when gradients are infinite; that counts as one."""
        if self._losses:
            self._end_part(optimizer, sys._getframe(1))  # noqa: SLF001 - as above

    def _before_commit(self, *_args: object) -> None:
        """The step is over: what comes now is of the next one."""
        if self._has_begun:
            self._write_late(is_end=True)
        self._has_begun = False
        self._forget()

    def _end_part(self, optimizer: Any, frame: FrameType) -> None:  # noqa: ANN401 - torch's
        if _is_within_checkpointing(frame):
            return
        if self._primary is None:
            self._primary = optimizer
        is_new = not self._has_begun if self._living.has("state") else optimizer is self._primary
        if not is_new:
            self._write_late(is_end=False)
            self._forget()
            return
        self._has_begun = True
        self._count += 1
        with _noted(self._directory):
            self._write(frame)
        self._forget()
        with _noted(self._directory):
            self._wait_at_gate()

    def _write(self, frame: FrameType) -> None:
        self._living.look(frame)
        states, epoch = self._living.states, epoch_in(frame)
        kept = self._look_at_keepers(frame, []) if self._kept is None else self._kept
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
                "weights": self._prints.of([parameters_of(each) for each in self._living.optimizers()]),
                "buffers": self._buffers,
                "random": self._prints.of_random_states(),
                "objects": [seen for each in self._living.known if (seen := self._describe(each)) is not None] + kept,
                "model": self._module,
                "models": self._keepers.trained,
                "seeded": self._seeding.in_use(),
                "read": list(self._files.read) if self._count == 1 else [],
                "overwritten": list(self._files.overwritten),
            }
        )

    def _write_late(self, *, is_end: bool) -> None:
        if is_end or self._losses or self._inputs:
            with _noted(self._directory):
                self._append({"type": "late", "losses": self._losses, "inputs": self._inputs, "is_end": is_end})

    def _append(self, record: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _look_at_keepers(self, frame: FrameType, noted: list[Any]) -> list[dict[str, Any]]:
        """Describe what keeps tensors, but for the weights and those that are noted otherwise."""
        seen: list[dict[str, Any]] = []
        with _noted(self._directory):
            self._living.look(frame)
            others = [thing for each in self._living.known if (thing := each.thing()) is not None]
            weights = [weight for each in self._living.optimizers() for weight in parameters_of(each)]
            for each in self._keepers.find(frame, self._living.states, others, weights + noted):
                described = {"kind": each.kind, "type": each.type, "name": each.name, "is_held": each.is_held}
                seen.append({**described, "mark": self._prints.of(each.tensors), "is_old": each.is_old})
        return seen

    def _describe(self, known: KnownObject) -> dict[str, Any] | None:
        thing = known.thing()
        if thing is None:
            return None
        if known.kind == "optimizer":
            mark = self._prints.of_optimizer(thing)
        elif known.kind == "generator":
            mark = self._prints.of(thing.get_state())
        else:
            mark = self._prints.of(thing.state_dict())
        label = "Generator" if known.kind == "generator" else type(thing).__name__
        return {"kind": known.kind, "type": label, "name": known.name, "is_held": known.is_held, "mark": mark}

    def _wait_at_gate(self) -> None:
        """Hold the script here for as long as the gate says so."""
        until = time.monotonic() + _HELD_AT_MOST_S
        while (gate := read_gate(self._directory)).holds(self._group, self._count) and time.monotonic() < until:
            time.sleep(_POLL_S)
        if pace_s := gate.pace_of(self._group, self._count):
            time.sleep(pace_s)


def _is_within_checkpointing(frame: FrameType | None) -> bool:
    """Whether torch makes this step only to create an optimizer's state, as `get_state_dict` does before it loads.

    It does so with gradients of zero, but so may a training; what tells is who calls. (`_init_optim_state` in
    torch.distributed.checkpoint.state_dict, torch 2.3 to 2.13.)
    """
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint."):
            return True
        frame = frame.f_back
    return False


@contextmanager
def _noted(directory: Path) -> Iterator[None]:
    """Note errors of the recorder's own in a file, and go on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the script is not to blame
        with suppress(OSError), (directory / "recorder-errors.txt").open("a", encoding="utf-8") as file:
            file.write("".join(traceback.format_exception(error)))
