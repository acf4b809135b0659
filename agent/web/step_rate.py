"""How fast steps are made, from looks once in a while. No clock here: `now` is in seconds, on any one clock."""

from __future__ import annotations

_STANDS_STILL = 3.0
"""So many usual times between two changes without one: there is no pace any more."""
_LOOK_S = 1.0


class StepRate:
    """Steps a second; steps may take much longer than the time between two looks."""

    def __init__(self) -> None:
        self.gained = 0
        """Steps that nobody had made before."""
        self._highest: int | None = None
        self._step = 0
        self._at = 0.0
        self._usual_s = _LOOK_S
        self._pace = 0.0

    def take(self, now: float, step: int) -> float:
        """Take the newest step of all ranks; 0: none in this group yet. Returns the pace."""
        if self._highest is None or step < self._step:
            self._begin(now, step)
        elif step > self._step:
            self._usual_s = now - self._at
            self._pace = (step - self._step) / self._usual_s if self._usual_s > 0.0 else 0.0
            self._step, self._at = step, now
        elif now - self._at > _STANDS_STILL * max(self._usual_s, _LOOK_S):
            self._pace = 0.0
        if self._highest is not None and step > self._highest:
            self.gained += step - self._highest
        self._highest = max(step, self._highest or 0)
        return self._pace

    def _begin(self, now: float, step: int) -> None:
        self._step, self._at, self._pace = step, now, 0.0
