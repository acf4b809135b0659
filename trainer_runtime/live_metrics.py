"""The metrics of the last commit on the control page, from which the agent's web page draws them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from trainer_runtime.contract import ControlPage


class LiveMetrics:
    """Writes metrics when the agent asks. Devices are not waited for: that takes time, and breaks a graph's capture.

    Metrics on devices are therefore written when they are read anyway, for a checkpoint or a function of `on_commit`.

    Args:
        page: this rank's control page; None: no agent asks.
    """

    def __init__(self, page: ControlPage | None) -> None:
        self._page = page
        self.answered = 0
        """The newest `page.metrics_asked` that was answered."""

    def answer(self, asked: int, step: int, metrics: dict[str, float | torch.Tensor]) -> None:
        """Write the metrics of a step, without those that are on a device, or are no numbers."""
        self.answered = asked
        numbers = {name: number for name, value in metrics.items() if (number := _at_hand(value)) is not None}
        if numbers:
            self.note(step, numbers)

    def note(self, step: int, numbers: dict[str, float]) -> None:
        """Write metrics of a step that have been read."""
        if self._page is not None and numbers:
            self._page.write_metrics(step, numbers)


def _at_hand(value: object) -> float | None:
    """Return a metric as a number. None: it is on a device, or is no number, which the next save reports."""
    if isinstance(value, torch.Tensor) and not (type(value) is torch.Tensor and value.device.type == "cpu"):
        return None  # a DTensor, say, would need the other ranks
    try:
        return float(value.item() if isinstance(value, torch.Tensor) else value)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - whatever the value raises: training must not depend on whether the page is on
        return None
