"""The agent's end of a worker's channel, for tests of the runtime: a real socket, answered on a thread.

Also fixtures in the form of functions: this process as a worker with or without an agent.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import trainer_runtime as tr
from trainer_runtime import agent_channel, contract
from trainer_runtime.agent_channel import AgentChannel
from trainer_runtime.snapshot_page import read_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    import pytest


class FakeAgent:
    """Commits all checkpoints, unless it is set to refuse."""

    def __init__(self, committed: dict[str, Any] | None = None) -> None:
        self.committed = committed
        """The job's committed checkpoint."""
        self.refuses = ""
        self.is_mute = False
        self.is_over = True
        """Whether the group is over, for workers that ask whether to leave."""
        self.asked: list[dict[str, Any]] = []
        """Checkpoints that workers asked to publish."""
        self.unreadable: list[str] = []
        """Descriptions of states that workers could not read."""
        self.started: list[dict[str, Any]] = []
        """Reports of first steps."""
        self.snapshots: list[int] = []
        """Steps for which workers reported a complete snapshot."""
        self.quiesced: list[tuple[int, int]] = []
        """Handoffs, and steps, for which workers reported that all ranks are quiesced with snapshots."""
        self.damaged: list[dict[str, Any]] = []
        """Pieces that workers reported as damaged."""
        self.copy: dict[str, Any] | None = None
        """The state to begin from, if it is not that of the committed checkpoint."""
        self.held: list[dict[str, Any]] = []
        """The pieces of that state in memory; `memories` has their descriptors."""
        self.memories: list[int] = []
        self.on_publish: Callable[[dict[str, Any]], object] = lambda _asked: None
        self._channels: list[AgentChannel] = []
        self._sock, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def open(self) -> AgentChannel:
        """A worker's end; one at a time may be in use."""
        self._channels.append(AgentChannel(os.dup(self.theirs.fileno())))
        return self._channels[-1]

    def hold(self, step: int, memories: dict[int, int], *, only_parts: Collection[int] = ()) -> None:
        """Let the next group begin from a snapshot.

        Args:
            step: which.
            memories: of ranks on this node, by descriptor.
            only_parts: of which of them it has no more than their own part.
        """
        self.copy, self.held, self.memories = {"run": "us", "group": 1, "step": step, "save": 0}, [], []
        for rank, memory in memories.items():
            slot = next(slot for slot in read_slots(memory) if slot.step == step)
            common = ("common", slot.common_at, slot.common_bytes, slot.common_sum)
            part = ("part", slot.part_at, slot.part_bytes, slot.part_sum)
            has_common = slot.common_bytes and rank not in only_parts
            for kind, at, size, checksum in (common, part) if has_common else (part,):
                told = {"kind": kind, "rank": rank, "world_size": slot.world_size}
                self.held.append({**told, "at": at, "bytes": size, "sum": checksum})
                self.memories.append(memory)

    def end(self) -> None:
        """End, as an agent does that is killed."""
        self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of both ends."""
        self.end()
        self._thread.join()
        for end in (self._sock, self.theirs, *(channel._sock for channel in self._channels)):
            end.close()

    def _serve(self) -> None:
        while packet := self._sock.recv(contract.MESSAGE_BYTES):
            answer = self._answer(json.loads(packet))
            if answer is not None and not self.is_mute:
                memories = self.memories if "restore_point" in answer else []
                socket.send_fds(self._sock, [json.dumps(answer).encode()], memories)

    def _answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        if "publish" in message:
            return self._verdict(message["publish"])
        if self._note(message):
            return None
        if message == {"ask": "leave"}:
            return {"leave": True} if self.is_over else None
        assert message == {"ask": "restore_point"}
        return self._restore_point()

    def _note(self, message: dict[str, Any]) -> bool:
        """What needs no answer."""
        (kind, said), *_ = message.items()
        told = {"unreadable": self.unreadable, "damaged": self.damaged, "started": self.started}
        if kind == "snapshot":
            self.snapshots.append(said["step"])
        elif kind == "quiesced":
            self.quiesced.append((said["handoff"], said["step"]))
        elif kind in told:
            told[kind].append(said)
        return kind in {"snapshot", "quiesced", *told}

    def _restore_point(self) -> dict[str, Any]:
        copy = self.copy or (self.committed and self.committed["copy"])
        return {"restore_point": {"copy": copy, "checkpoint": self.committed, "memory": self.held}}

    def _verdict(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(asked)
        self.on_publish(asked)
        if not self.refuses and not self.is_mute:
            number = self.committed["number"] + 1 if self.committed else 1
            self.committed = {"v": 1, **asked, "number": number}
        checkpoint = None if self.refuses else self.committed
        return {"verdict": {"copy": asked["copy"], "checkpoint": checkpoint, "reason": self.refuses}}


def start_without_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove an agent's variables from the environment, and initialize the runtime."""
    for name in (contract.RUN_ID, contract.GROUP, contract.FRESH, contract.CONTROL_FD, contract.CHANNEL_FD):
        monkeypatch.delenv(name, raising=False)
    tr.init()


@contextmanager
def control_page(monkeypatch: pytest.MonkeyPatch) -> Iterator[contract.ControlPage]:
    """Give this process a control page."""
    page, descriptor = contract.ControlPage.create("test")
    monkeypatch.setenv(contract.CONTROL_FD, str(descriptor))
    yield page
    os.close(descriptor)
    page.close()


@contextmanager
def agent_of_this_process(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAgent]:
    """Make this process a worker of an agent, in group 3, with checkpoints in `directory`."""
    agent = FakeAgent()
    agent_channel._open_once.cache_clear()
    variables = {contract.RUN_ID: "us", contract.GROUP: "3", contract.CHECKPOINT_DIR: str(directory)}
    for name, value in {**variables, contract.CHANNEL_FD: str(agent.theirs.fileno())}.items():
        monkeypatch.setenv(name, value)
    yield agent
    taken = agent_channel.open_channel()
    assert taken
    taken._sock.detach()
    agent_channel._open_once.cache_clear()
    agent.close()
