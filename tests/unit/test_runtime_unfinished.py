"""How many collectives a rank has begun that are unfinished, as torch's flight recorder has it."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import pytest
from waiting import wait_for

from trainer_runtime import contract
from trainer_runtime.agent_events import AgentEvents
from trainer_runtime.unfinished import count_unfinished

ENDED, BEGUN = {"retired": True, "is_p2p": False}, {"retired": False, "is_p2p": False}


@pytest.mark.parametrize(
    ("entries", "count"),
    [
        ([ENDED, BEGUN, BEGUN], 2),
        ([ENDED], 0),
        ([ENDED, {"retired": False, "is_p2p": True}], 0),
        ([{"state": "scheduled"}], 0),
        ([], None),
    ],
)
def test_what_is_recorded_is_counted(
    monkeypatch: pytest.MonkeyPatch, entries: list[dict[str, object]], count: int | None
) -> None:
    recorder = SimpleNamespace(_dump_fr_trace_json=lambda *_: json.dumps({"entries": entries}).encode())
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", recorder)
    assert count_unfinished() == count


@pytest.mark.parametrize(
    "recorder",
    [
        SimpleNamespace(),
        *(
            SimpleNamespace(_dump_fr_trace_json=lambda *_, text=text: text)
            for text in (b"\x80", b"[]", b'{"entries": [1]}')
        ),
    ],
)
def test_another_version_of_torch_is_no_error(monkeypatch: pytest.MonkeyPatch, recorder: SimpleNamespace) -> None:
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", recorder)
    assert count_unfinished() is None


@pytest.mark.parametrize("count", [None, 0, 3])
def test_the_agents_question_is_answered_once(monkeypatch: pytest.MonkeyPatch, count: int | None) -> None:
    monkeypatch.setattr("trainer_runtime.agent_events.count_unfinished", lambda: count)
    page, descriptor = contract.ControlPage.create("asked")
    event = os.eventfd(0, os.EFD_NONBLOCK)
    AgentEvents(page, event)
    assert (page.answered, page.unfinished) == (0, None)
    page.question = 2
    os.eventfd_write(event, 1)
    wait_for(lambda: page.answered == 2, "the answer")
    assert page.unfinished == count
    os.close(descriptor)
