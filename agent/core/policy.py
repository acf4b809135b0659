"""Durations and limits of a job, which its agents were given on the command line."""

from __future__ import annotations

from dataclasses import dataclass

_SAME_WITHIN_S = 5.0


@dataclass(frozen=True)
class Policy:
    """Durations and limits that the planner and the life cycle use. Durations are in seconds."""

    lease_ttl_s: float
    settle_s: float
    """How long to wait for more nodes after the last arrival, between min and max."""
    stop_grace_s: float
    """Time between SIGTERM and SIGKILL when workers are stopped for a planned change."""
    kill_timeout_s: float
    """Seconds after SIGKILL. A node with a process that is still alive then is unfit."""
    max_restarts: int
    """Number of worker failures without progress that are answered with a restart."""
    handoff_timeout_s: float
    """How long a member that was asked to leave waits for its group to stop and save."""
    handoff_wait_s: float
    """How long ranks that stopped and saved wait for the next group before they train on."""
    elastic_timeout_s: float | None
    """How long the job waits for nodes before it gives up. None: forever."""
    progress_window_s: float
    """This much new training resets the count of failures."""
    preempted_code: int = 0
    """Exit code of an agent that was asked to leave by a signal."""
    ends_at_script_errors: bool = False
    """An error in the script that ends every rank twice in a row, before anything was trained, ends the job."""

    @property
    def same_within_s(self) -> float:
        """How long to wait after such an error for the same one: in other ranks of its node, then on other nodes.

        The ranks import the same libraries, but not equally fast.
        """
        return _SAME_WITHIN_S if self.ends_at_script_errors else 0.0
