"""Records in a rank's process what each optimizer step began with: one line of JSON per step.

A line is written before the optimizer changes anything, so all in it but the inputs, the loss and the random states
is what the step began with. After a restart, what differs there in the first line is a cause and no consequence.

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
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from agent.rehearse.fingerprints import Fingerprints, parameters_of
from agent.rehearse.gate import read_gate
from agent.rehearse.living import Known, Living, epoch_in, names_in
from agent.rehearse.startup import when_imported
from trainer_runtime import contract

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_POLL_S = 0.005
_HELD_AT_MOST_S = 90.0
"""If the rehearsal is gone, nobody else lets the script go on."""


def record(torch: ModuleType, directory: Path) -> None:
    """Hook a recorder into torch, which has just been imported."""
    Recorder(torch, directory, int(os.environ["RANK"]), int(os.environ[contract.GROUP])).install()


class Recorder:
    """Follows one rank of one group.

    Args:
        torch: the imported module.
        directory: for the records; holds the gate.
        rank: of this process.
        group: number of its group.
    """

    def __init__(self, torch: Any, directory: Path, rank: int, group: int) -> None:  # noqa: ANN401
        self._torch = torch
        self._directory = directory
        self._group = group
        self._path = directory / f"group-{group:06d}.rank-{rank:05d}.jsonl"
        self._prints = Fingerprints(torch)
        self._living = Living(torch)
        self._count = 0
        self._primary: Any = None
        self._module = ""
        self._begin_step()

    def install(self) -> None:
        """Put the hooks in place."""
        torch = self._torch
        warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")  # of torch.compile
        self._living.watch()
        when_imported("trainer_runtime.state", lambda module: self._living.watch_class(module.State, "state"))
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

    def _begin_step(self) -> None:
        self._losses: list[float | None] = []
        self._inputs: list[str] = []
        self._rows: list[str] = []
        self._buffers = ""
        self._is_between = True

    def _before_forward(self, module: Any, args: tuple[Any, ...]) -> None:  # noqa: ANN401 - torch's
        """Note the inputs of the outermost module: the first that is called after a backward pass."""
        if not self._is_between or not self._torch.is_grad_enabled() or not self._prints.has_tensor(args):
            return
        self._is_between = False
        with _noted(self._directory):
            if not self._inputs:
                self._buffers = self._prints.of(*module.buffers())
            if not self._module:
                self._module = names_in(sys._getframe(1)).get(id(module), "")  # noqa: SLF001 - the script's variables
            self._inputs.append(self._prints.of(args))
            self._rows += self._prints.of_rows(args)

    def _before_backward(self, loss: Any, *_args: object) -> None:  # noqa: ANN401 - torch's
        self._is_between = True
        with _noted(self._directory):
            plain = getattr(loss, "_unscaled_loss", loss).detach()
            value = float(plain.sum())
            self._losses.append(value if math.isfinite(value) else None)

    def _before_optimizer(self, optimizer: Any, _args: object, _kwargs: object) -> None:  # noqa: ANN401 - torch's
        """Write a line, once per training step though the script may have several optimizers."""
        if self._primary is None:
            self._primary = optimizer
        if optimizer is self._primary:
            self._finish_step(sys._getframe(1))  # noqa: SLF001 - the script's variables

    def _after_scaler(self, _scaler: object, optimizer: Any, *_args: object) -> None:  # noqa: ANN401 - torch's
        """A scaler leaves a step out when gradients are infinite; that counts as one."""
        if self._losses and (self._primary is None or optimizer is self._primary):
            self._finish_step(sys._getframe(1))  # noqa: SLF001 - as above

    def _finish_step(self, frame: FrameType) -> None:
        self._count += 1
        with _noted(self._directory):
            self._write(frame)
        self._begin_step()
        with _noted(self._directory):
            self._wait_at_gate()

    def _write(self, frame: FrameType) -> None:
        self._living.look(frame)
        states, epoch = self._living.states, epoch_in(frame)
        optimizers = [thing for each in self._living.known if each.kind == "optimizer" and (thing := each.thing())]
        line = {
            "count": self._count,
            "step": states[0].step + 1 if states else None,
            "state_epoch": states[0].epoch if states else None,
            "epoch": epoch[1] if epoch else None,
            "epoch_name": epoch[0] if epoch else "",
            "world": int(os.environ["WORLD_SIZE"]),
            "losses": self._losses,
            "inputs": self._inputs,
            "rows": self._rows,
            "weights": self._prints.of([parameters_of(each) for each in optimizers]),
            "buffers": self._buffers,
            "random": self._prints.of_random_states(),
            "objects": [seen for each in self._living.known if (seen := self._describe(each)) is not None],
            "model": self._module,
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _describe(self, known: Known) -> dict[str, Any] | None:
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


@contextmanager
def _noted(directory: Path) -> Iterator[None]:
    """Note errors of the recorder's own in a file, and go on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the script is not to blame
        with suppress(OSError), (directory / "recorder-errors.txt").open("a", encoding="utf-8") as file:
            file.write("".join(traceback.format_exception(error)))
