"""The process that watches the job: python -m agent.web, with its orders on standard input, until that is closed."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import sys
import time
from contextlib import closing, suppress

from agent.core.model import Node
from agent.observe.log import configure, log
from agent.runtime import node_facts
from agent.store.etcd import EtcdStore
from agent.store.keys import JobKeys
from agent.web import start_message
from agent.web.app import Site
from agent.web.events import EventLog
from agent.web.finished_incidents import FinishedIncidents
from agent.web.hub import Hub, KnownJobState
from agent.web.metrics import Metrics
from agent.web.server import WebServer
from agent.web.traces import exporter
from trainer_runtime import tls

_NICENESS = 10
"""The ranks come first."""


def main() -> None:
    """Watch until the agent closes our standard input, or is gone."""
    # A terminal's go to the agent too, which answers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICENESS)
    told = start_message.decode(sys.stdin.buffer.readline())
    configure(told.node_id)
    home = JobKeys(told.job_id).prefix
    try:
        encrypted = _tls(told)
    except tls.TlsError as error:  # they were in order when the agent started
        log.error(f"the web page cannot be served: {error}")
        sys.exit(1)
    with closing(EtcdStore(told.endpoints, told.credentials, home=home)) as store:
        asyncio.run(_watch(told, store, encrypted))


async def _watch(told: start_message.StartMessage, store: EtcdStore, encrypted: ssl.SSLContext | None) -> None:
    agent, host = os.getppid(), node_facts.host_identity()

    def is_here(there: Node) -> bool:
        return there.pid == agent and there.host == host

    metrics, export, news = Metrics(told.job_id), exporter(told.job_id), FinishedIncidents(told.since)
    events = EventLog(told.job_id, told.events, is_again=told.is_again) if told.events is not None else None

    def on_change(known: KnownJobState) -> None:
        over = news.of(known)
        metrics.count(over)
        if _leads(known, hub):  # of all nodes that do it, one tells
            export(over)
        if events is not None:
            events.note(known, over, time.time())

    hub = Hub(store, JobKeys(told.job_id), is_here, on_change)
    metrics.show(hub)
    server = None
    if told.listener is not None:
        server = WebServer(Site(hub, metrics, told.token).app(), told.listener, encrypted)
    has_ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:  # nothing more is ever said to us: what can be read is the end, by the agent or of it
        loop.remove_reader(sys.stdin)
        if server is not None:
            server.leave()
        has_ended.set()

    loop.add_reader(sys.stdin, end)
    async with asyncio.TaskGroup() as tasks:
        if server is not None:
            tasks.create_task(server.run_until_told())
        await hub.run(has_ended)
    if events is not None:
        events.close()


def _tls(told: start_message.StartMessage) -> ssl.SSLContext | None:
    """The page's certificate. Browsers have none, so nobody is asked for one."""
    if told.tls is None:
        return None
    return tls.accepting(told.tls, callers=ssl.CERT_NONE, minimum=ssl.TLSVersion.TLSv1_2)


def _leads(known: KnownJobState, hub: Hub) -> bool:
    here, leader = hub.here, known.view.leader
    return here is not None and leader is not None and leader.value.node_id == here.node_id


if __name__ == "__main__":
    main()
