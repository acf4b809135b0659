"""The process that watches the job: `python -m agent.web`. It reads its start message from standard input.

It ends when standard input is closed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import sys
import time
from contextlib import closing, suppress

from agent import node_facts
from agent.core.model import Node
from agent.observe.log import configure, log
from agent.store.etcd import EtcdStore
from agent.store.keys import JobKeys
from agent.web import page_process
from agent.web.app import Site
from agent.web.events import EventLog, FinishedIncidents
from agent.web.hub import Hub, KnownJobState
from agent.web.metrics import Metrics
from agent.web.page_process import StartMessage
from agent.web.server import WebServer
from agent.web.traces import exporter
from trainer_runtime import tls

_NICENESS = 10
"""Lower priority than the ranks."""


def main() -> None:
    """Watch the job until the agent closes standard input or is gone."""
    # A terminal sends its signals to the agent too, which then ends this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICENESS)
    message = page_process.decode(sys.stdin.buffer.readline())
    configure(message.node_id)
    home = JobKeys(message.job_id).prefix
    try:
        context = _tls_context(message)
    except tls.TlsError as error:  # the files were valid when the agent started
        log.error(f"the web page cannot be served: {error}")
        sys.exit(1)
    with closing(EtcdStore(message.endpoints, message.credentials, home=home)) as store:
        asyncio.run(_watch(message, store, context))


async def _watch(message: StartMessage, store: EtcdStore, context: ssl.SSLContext | None) -> None:
    agent, host = os.getppid(), node_facts.host_identity()

    def is_own_node(node: Node) -> bool:
        return node.pid == agent and node.host == host

    metrics, export, finished = Metrics(message.job_id), exporter(message.job_id), FinishedIncidents(message.since)
    events = _event_log(message)

    def on_change(known: KnownJobState) -> None:
        over = finished.of(known)
        metrics.count(over)
        if _is_leader(known, hub):  # so that one node exports each trace
            export(over)
        if events is not None:
            events.update(known, over, time.time())

    hub = Hub(store, JobKeys(message.job_id), is_own_node, on_change)
    metrics.show(hub)
    server = None
    if message.listener is not None:
        server = WebServer(Site(hub, metrics, message.token).app(), message.listener, context)
    has_ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:  # nothing follows the start message: standard input becomes readable when it is closed
        loop.remove_reader(sys.stdin)
        if server is not None:
            server.leave()
        has_ended.set()

    loop.add_reader(sys.stdin, end)
    async with asyncio.TaskGroup() as tasks:
        if server is not None:
            tasks.create_task(server.serve_until_left())
        await hub.run(has_ended)
    if events is not None:
        events.close()


def _event_log(message: StartMessage) -> EventLog | None:
    if message.events is None:
        return None
    return EventLog(message.job_id, message.events, is_restart=message.is_restart)


def _tls_context(message: StartMessage) -> ssl.SSLContext | None:
    """Return the page's TLS context. Clients need no certificate, since browsers have none."""
    if message.tls is None:
        return None
    return tls.accepting(message.tls, callers=ssl.CERT_NONE, minimum=ssl.TLSVersion.TLSv1_2)


def _is_leader(known: KnownJobState, hub: Hub) -> bool:
    node, leader = hub.node, known.view.leader
    return node is not None and leader is not None and leader.value.node_id == node.node_id


if __name__ == "__main__":
    main()
