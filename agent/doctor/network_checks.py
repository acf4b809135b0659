"""Checks of the ways to other machines: etcd, ports, and the doctors that run there.

With `--ips` a doctor listens where the job's etcd would, and tells only callers from the named machines. It calls all
others until they answer or its time is over; both sides tell what they are, so each learns whether it is reached, how
far the clocks are apart, and what differs.
"""

from __future__ import annotations

import json
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Self

from agent.doctor.facts import Facts, Finding
from agent.errors import StoreRefused, StoreUnavailable
from agent.runtime import node_facts
from agent.store.access import Access
from agent.store.etcd import EtcdStore
from agent.store.keys import JobKeys

_READS = 9
_SLOW_S = 0.1
_CALL_S = 1.0
_AGAIN_S = 0.2
_APART_S = 1.0
_FACTS_BYTES = 1 << 16


def etcd(access: Access, job_id: str, within_s: float) -> Finding:
    """Whether it answers, and how fast."""
    about = f"etcd at {access}"
    times: list[float] = []
    with closing(
        EtcdStore(access.endpoints, access.credentials, home=JobKeys(job_id).prefix, retry_for_s=within_s)
    ) as store:
        try:
            for _ in range(_READS):
                began = time.monotonic()
                store.read(())
                times.append(time.monotonic() - began)
        except StoreRefused as error:
            return Finding(about, str(error), "give --etcd_user and its password, or the certificates it asks for")
        except StoreUnavailable as error:
            return Finding(about, f"does not answer: {error}", "start it, open its port, or correct --elastic_server")
    median_s = statistics.median(times)
    found = f"answers in {1000 * median_s:.1f} ms (median of {_READS})"
    if median_s > _SLOW_S:
        return Finding(about, found, "give it a faster disk, or a place nearer to the nodes: recovery waits for it")
    return Finding(about, found)


@dataclass
class _Other:
    """What is known of another machine's doctor, at one of its ports."""

    why: str = "nobody answered"
    facts: Facts | None = None
    """None: it could not be called."""
    ahead_s: float = 0.0
    error_s: float = 0.0
    has_called: bool = False


class Rounds:
    """This machine's doctor, among those of all machines. Use it in a `with` block.

    Args:
        machines: all of them.
        own: which of them this is.
        ports: those by which machines of the job must reach each other.
        facts: what is told of this one.

    Raises:
        OSError: one of the ports cannot be taken here.
    """

    def __init__(self, machines: Sequence[str], own: str, ports: Sequence[int], facts: Facts) -> None:
        self._own = own
        self._ports = ports
        self._facts = facts
        self._others = {(name, port): _Other() for name in machines if name != own for port in ports}
        self._changed = threading.Condition()
        with ExitStack() as opened:
            family = socket.AF_INET6 if ":" in node_facts.resolve(own)[0] else socket.AF_INET
            listeners = [
                (opened.enter_context(socket.create_server((own, port), family=family)), port) for port in ports
            ]
            opened.pop_all()
        self._listeners = listeners
        self._answering = [threading.Thread(target=self._answer, args=each, daemon=True) for each in listeners]

    def __enter__(self) -> Self:
        """Begin to answer."""
        for thread in self._answering:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        for listener, _port in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in self._answering:
            thread.join()

    def examine(self, within_s: float) -> Iterator[Finding]:
        """Call all others, and wait until they have called here."""
        give_up_at = time.monotonic() + within_s
        callers = [threading.Thread(target=self._call, args=(*way, give_up_at), daemon=True) for way in self._others]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        with self._changed:
            left_s = max(_CALL_S, give_up_at - time.monotonic())
            self._changed.wait_for(lambda: all(each.has_called for each in self._others.values() if each.facts), left_s)
        for name in dict.fromkeys(name for name, _ in self._others):
            yield self._finding(name, within_s)

    def _finding(self, name: str, within_s: float) -> Finding:
        """The first thing that is wrong with a machine, or that nothing is."""
        about = f"machine {name}"
        ways = {port: other for (machine, port), other in self._others.items() if machine == name}
        for port, other in ways.items():
            if other.facts is None and other.has_called:
                found = f"calls here, and is not reached from here: {other.why}"
                return Finding(about, found, f"open port {port} at {name} for {self._own}")
            if other.facts is None:
                found = f"is not reached at port {port} within {within_s:g} s: {other.why}"
                return Finding(about, found, f"start the same elastic-agent doctor there, or open port {port}")
            if not other.has_called:
                found = "is reached, and does not reach this one"
                return Finding(about, found, f"open port {port} at {self._own} for {name}")
        last = list(ways.values())[-1]
        if last.facts is not None and (differences := self._facts.differences(last.facts)):
            return Finding(about, "; ".join(differences), "make them equal on all machines")
        if abs(last.ahead_s) - last.error_s > _APART_S:
            found = f"its clock is {last.ahead_s:+.1f} s from this one's"
            return Finding(about, found, "run an NTP client on both: logs of nodes are read side by side")
        return Finding(about, f"reached both ways, the same versions, clocks {1000 * abs(last.ahead_s):.0f} ms apart")

    def _call(self, name: str, port: int, give_up_at: float) -> None:
        other = self._others[name, port]
        while True:
            try:
                other.facts, other.ahead_s, other.error_s = self._ask(name, port)
            except OSError as error:
                other.why = error.strerror or str(error)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                other.why = "what answers is no doctor, or does not know this machine's address"
            else:
                return
            if time.monotonic() >= give_up_at:
                return
            time.sleep(_AGAIN_S)  # some failures come at once

    def _ask(self, name: str, port: int) -> tuple[Facts, float, float]:
        """What it tells, how far its clock is ahead, and by how much that may be wrong."""
        with self._connect(name, port) as there:
            there.settimeout(_CALL_S)
            began = time.time()
            there.sendall(self._told())
            with there.makefile("rb") as file:
                told = json.loads(file.readline(_FACTS_BYTES))
            ended = time.time()
        return Facts.told(told), float(told["time"]) - (began + ended) / 2, (ended - began) / 2

    def _connect(self, name: str, port: int) -> socket.socket:
        # From whatever address the system chooses, as agents and etcd do: the gate of the job's etcd goes by it.
        return socket.create_connection((name, port), _CALL_S)

    def _answer(self, listener: socket.socket, port: int) -> None:
        while True:
            try:
                caller, address = listener.accept()
            except OSError:  # it was closed
                return
            names = [
                name for name, at in self._others if at == port and address[0] in node_facts.resolve_if_there(name)
            ]
            with caller, suppress(OSError):
                if names or address[0] in node_facts.resolve_if_there(self._own):
                    caller.settimeout(_CALL_S)
                    with caller.makefile("rb") as file:
                        said = _machine_in(file.readline(_FACTS_BYTES))
                    caller.sendall(self._told())
                    # Where one machine has several addresses, the system may call from any of them.
                    name = said if (said, port) in self._others else "".join(names[:1])
                    with self._changed:
                        if name:
                            self._others[name, port].has_called = True
                            self._changed.notify_all()

    def _told(self) -> bytes:
        facts = {"packages": dict(self._facts.packages), "files": dict(self._facts.files)}
        told = {"machine": self._own, **facts, "time": time.time()}
        return json.dumps(told).encode() + b"\n"


def _machine_in(line: bytes) -> str:
    """Which machine a doctor says that it is; empty: it is no doctor."""
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    return str(told.get("machine", "")) if isinstance(told, dict) else ""
