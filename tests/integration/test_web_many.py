"""The page of a job of 200 nodes: their records are in a real etcd, and this process answers for each of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import pytest
from browsers import Visit, browser_open
from integration.conftest import PATIENCE_S, open_store
from nodes import TIMING
from reasons import LOST
from records import BEGAN_AT, RESTART, Run, ended

from agent import node_facts
from agent.core.incident import Incident
from agent.core.model import Group, Leader, Node, Spec
from agent.core.records import Identity, Record
from agent.links.pool import LinkPool
from agent.links.queries import LiveRank, LiveRanks
from agent.local_etcd.embedded import EmbeddedEtcd
from agent.rehearse.cluster import wait_for
from agent.store.access import ANONYMOUS
from agent.store.api import Put
from agent.store.etcd import EtcdStore
from agent.store.keys import JobKeys, encode
from agent.web.access import token_of
from agent.web.address import listen, url
from agent.web.page_process import StartMessage
from agent.web.page_process import encode as as_line

pytest.importorskip("uvicorn", reason="the extra `web` is not installed")

NODES, NPROC, SECRET = 200, 4, "of this test"
NAMES = [f"node-{number:03}" for number in range(NODES)]


class Played:
    """A node that answers polls: its ranks make ten steps per second."""

    def __init__(self, place: int) -> None:
        self._place = place
        self._links = LinkPool(
            on_change=lambda *_: None,
            on_clock=lambda *_: None,
            on_part=lambda _: None,
            log_files=None,  # type: ignore[arg-type]
            live_ranks=self._pulse,
            is_loop_alive=lambda: True,
            heartbeat_s=0.5,
        )
        self._links.hold(SECRET, Identity(NAMES[place], "1"), ())

    def record(self) -> Node:
        return Node(
            node_id=NAMES[self._place],
            incarnation="1",
            address="127.0.0.1",
            nproc=NPROC,
            port=1,
            link=self._links.port,
            host=node_facts.host_identity(),
            pid=os.getpid() if self._place == 0 else 1,
            pid_started=1,
            timing=TIMING,
            standby="4 of 4 warm, 312 MB each",
        )

    def close(self) -> None:
        self._links.close()

    def _pulse(self) -> LiveRanks:
        step, first = int(10 * (time.time() - BEGAN_AT)), NPROC * self._place
        ranks = tuple(LiveRank(rank=first + local, step=step, state="training") for local in range(NPROC))
        return LiveRanks(group=61, ranks=ranks, is_alive=True, lease_left_s=3.0, etcd_s=0.002)


def history() -> list[Incident]:
    """Return sixty incidents."""
    run = Run(*NAMES, nproc=NPROC)
    for number in range(1, 61):
        failed = ended(
            NAMES[number], NPROC * number, traceback="Traceback (most recent call last):\nValueError: no\n" * 9
        )
        run.add(
            "failed",
            600.0 * number,
            tuple(NAMES),
            ended=(failed,),
            phases=RESTART,
            replayed_steps=1,
            step_s=0.1,
            step=number,
        )
    return run.incidents


@dataclass(frozen=True)
class Page:
    """The page, and the records of its job, which are not written yet."""

    address: str
    """With the token."""
    store: EtcdStore
    records: list[tuple[str, Record]]

    def write_records(self) -> None:
        for key, record in self.records:
            self.store.transact([], [Put(key, encode(record))])


@pytest.fixture
def served(etcd: EmbeddedEtcd) -> Iterator[Page]:
    keys, incidents = JobKeys("many"), history()
    with ExitStack() as stack:
        played = [Played(place) for place in range(NODES)]
        for each in played:
            stack.callback(each.close)
        nodes = [each.record() for each in played]
        members = tuple(each.member for each in nodes)
        group = Group(
            run="r1",
            number=61,
            members=members,
            cause="failed",
            reason=LOST,
            restarts=1,
            step=60,
            reached=NODES,
        )
        records: list[tuple[str, Record]] = [
            (keys.spec, Spec(run="r1", np_min=1, np_max=NODES, secret=SECRET, changed_by="", changed_at=0.0)),
            (keys.leader, Leader(node_id=NAMES[0], incarnation="1")),
            (keys.group, group),
            *((keys.node(each.node_id), each) for each in nodes),
            *((keys.incident(each.group), each) for each in incidents),
        ]
        store = stack.enter_context(closing(open_store(etcd.endpoint)))
        listener = stack.enter_context(listen("127.0.0.1", 0))
        message = StartMessage(
            listener=listener.fileno(),
            events=None,
            since=0.0,
            is_restart=False,
            endpoints=(etcd.endpoint,),
            credentials=ANONYMOUS,
            job_id="many",
            node_id=NAMES[0],
            token=None,
        )
        argv = [sys.executable, "-m", "agent.web"]
        process = stack.enter_context(subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=(listener.fileno(),)))
        stack.callback(process.kill)
        process.stdin.write(as_line(message))
        process.stdin.flush()
        yield Page(f"{url(listener, '')}/#token={token_of(SECRET)}", store, records)


def test_a_page_that_is_opened_before_the_job_is_known_shows_it_as_soon_as_it_is(served: Page) -> None:
    """Nobody has to enter the token again."""
    with browser_open() as browser, Visit(browser, "about:blank") as visit:
        page: Any = visit.page
        page.goto(served.address)
        wait_for(lambda: "the job is not known yet" in page.inner_text("#refused"), PATIENCE_S, "the refusal")
        served.write_records()
        wait_for(lambda: page.locator("#nodes tr").count() == NODES, PATIENCE_S, "all nodes")
        assert page.inner_text("#refused") == ""


def test_the_page_of_two_hundred_nodes_is_there_soon_and_stays_live(served: Page) -> None:
    served.write_records()
    with browser_open() as browser, Visit(browser, "about:blank") as visit:
        page: Any = visit.page
        page.goto(served.address)
        wait_for(lambda: page.locator("#nodes tr").count() == NODES, PATIENCE_S, "all nodes")
        shown_s = page.evaluate("performance.now()") / 1000
        assert shown_s < 10.0, "2 s where nothing else runs"
        wait_for(lambda: page.locator(".rank.training").count() == NODES * NPROC, PATIENCE_S, "all ranks")
        assert page.locator("#incidents details").count() == 50
        step = "Number(document.querySelectorAll('.rank')[799].textContent.split(' ')[1])"
        before = page.evaluate(step)
        wait_for(lambda: page.evaluate(step) > before + 30, PATIENCE_S, "steps")
        assert page.locator("#live").text_content() == "live"
        print(f"shown after {shown_s:.2f} s")
