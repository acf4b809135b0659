"""The author of a change from the page: the page and the client's address, not the user who runs the agent."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

from agent.core.model import Spec
from agent.operate.jobs import read_view
from agent.store.api import Put
from agent.store.keys import JobKeys, encode
from agent.store.memory import MemoryStore
from agent.web.app import Site
from agent.web.hub import Hub
from agent.web.metrics import Metrics

TOKEN = b"0123456789abcdef"
KEYS = JobKeys("j")


def post_np(site: Site, body: bytes, peer: str) -> int:
    """Call the application directly; return the status of the response."""
    answers: list[Any] = []
    head = [(b"host", b"h"), (b"authorization", b"Bearer " + TOKEN)]
    scope = {"type": "http", "method": "POST", "path": "/np", "headers": head, "query_string": b"", "client": (peer, 1)}

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(answer: object) -> None:
        answers.append(answer)

    asyncio.run(site.app()(scope, receive, cast("Any", send)))
    return int(answers[0]["status"])


def test_a_change_names_the_page_and_the_client_address() -> None:
    store = MemoryStore().client()
    spec = Spec(run="r1", np_min=1, np_max=2, secret="s3cret", changed_by="me@here", changed_at=0.0)
    store.transact([], [Put(KEYS.spec, encode(spec))])
    hub = Hub(store, KEYS, lambda _node: False, lambda _known: None)
    site = Site(hub, Metrics("j"), TOKEN.decode())
    assert post_np(site, b'{"np": "1:3"}', "10.0.0.7") == 200
    seen = read_view(store, KEYS).spec
    assert seen is not None
    assert (seen.value.np, seen.value.changed_by) == ("1:3", f"the web page of {socket.gethostname()}, from 10.0.0.7")
