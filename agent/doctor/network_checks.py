"""Checks of the connections to other machines: to etcd, through ports, and to the doctors that run there.

With `--ips` a doctor listens on the ports of the job's etcd, and answers only callers from the named machines. It calls
all others until they answer or its time is over. Both sides exchange their facts, so each learns whether it is
reachable, how far the clocks differ, and which versions and files differ.
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

from agent import node_facts
from agent.doctor.facts import Facts, Finding
from agent.errors import StoreRefused, StoreUnavailable
from agent.store.access import Access
from agent.store.etcd import EtcdStore
from agent.store.keys import JobKeys

_READS = 9
_SLOW_S = 0.1
_CALL_S = 1.0
_RETRY_S = 0.2
_MAX_CLOCK_OFFSET_S = 1.0
_FACTS_BYTES = 1 << 16


def etcd(access: Access, job_id: str, within_s: float) -> Finding:
    """Check whether etcd answers, and how fast."""
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
class _RemoteDoctor:
    """The state of another machine's doctor at one of its ports."""

    failure: str = "no answer"
    facts: Facts | None = None
    """None: it could not be called."""
    clock_offset_s: float = 0.0
    clock_error_s: float = 0.0
    has_called: bool = False


class MachineChecks:
    """This machine's doctor, among those of all machines. Use it in a `with` block.

    Args:
        machines: all machines.
        own: the name of this one.
        ports: ports on which the machines of the job must reach each other.
        facts: the facts of this machine.

    Raises:
        OSError: one of the ports cannot be bound here.
    """

    def __init__(self, machines: Sequence[str], own: str, ports: Sequence[int], facts: Facts) -> None:
        self._own = own
        self._ports = ports
        self._facts = facts
        self._others = {(name, port): _RemoteDoctor() for name in machines if name != own for port in ports}
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
        """Start to answer calls."""
        for thread in self._answering:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop answering."""
        for listener, _port in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in self._answering:
            thread.join()

    def examine(self, within_s: float) -> Iterator[Finding]:
        """Call all other doctors, and wait for their calls."""
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
        """Describe the first problem with a machine, or that there is none."""
        about = f"machine {name}"
        doctors = {port: other for (machine, port), other in self._others.items() if machine == name}
        for port, other in doctors.items():
            if other.facts is None and other.has_called:
                found = f"reaches this machine, but cannot be reached from it: {other.failure}"
                return Finding(about, found, f"open port {port} at {name} for {self._own}")
            if other.facts is None:
                found = f"cannot be reached at port {port} within {within_s:g} s: {other.failure}"
                return Finding(about, found, f"start the same elastic-agent doctor there, or open port {port}")
            if not other.has_called:
                found = "can be reached, but does not reach this machine"
                return Finding(about, found, f"open port {port} at {self._own} for {name}")
        last = list(doctors.values())[-1]
        if last.facts is not None and (differences := self._facts.differences(last.facts)):
            return Finding(about, "; ".join(differences), "make them equal on all machines")
        if abs(last.clock_offset_s) - last.clock_error_s > _MAX_CLOCK_OFFSET_S:
            found = f"its clock differs from this one's by {last.clock_offset_s:+.1f} s"
            return Finding(about, found, "run an NTP client on both: logs of nodes are read side by side")
        return Finding(
            about, f"reached both ways, the same versions, clocks {1000 * abs(last.clock_offset_s):.0f} ms apart"
        )

    def _call(self, name: str, port: int, give_up_at: float) -> None:
        other = self._others[name, port]
        while True:
            try:
                other.facts, other.clock_offset_s, other.clock_error_s = self._query(name, port)
            except OSError as error:
                other.failure = error.strerror or str(error)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                other.failure = "what answers is not a doctor, or is one that does not know this machine's address"
            else:
                return
            if time.monotonic() >= give_up_at:
                return
            time.sleep(_RETRY_S)  # some failures are immediate

    def _query(self, name: str, port: int) -> tuple[Facts, float, float]:
        """Return its facts, the offset of its clock, and the error bound of that offset."""
        with self._connect(name, port) as there:
            there.settimeout(_CALL_S)
            began = time.time()
            there.sendall(self._own_message())
            with there.makefile("rb") as file:
                message = json.loads(file.readline(_FACTS_BYTES))
            ended = time.time()
        return Facts.from_json(message), float(message["time"]) - (began + ended) / 2, (ended - began) / 2

    def _connect(self, name: str, port: int) -> socket.socket:
        # The system chooses the source address, as for agents and etcd: the connection filter of the job's etcd checks
        # it.
        return socket.create_connection((name, port), _CALL_S)

    def _answer(self, listener: socket.socket, port: int) -> None:
        while True:
            try:
                caller, address = listener.accept()
            except OSError:  # the listener was closed
                return
            names = [
                name for name, at in self._others if at == port and address[0] in node_facts.resolve_if_there(name)
            ]
            with caller, suppress(OSError):
                if names or address[0] in node_facts.resolve_if_there(self._own):
                    caller.settimeout(_CALL_S)
                    with caller.makefile("rb") as file:
                        claimed = _machine_name(file.readline(_FACTS_BYTES))
                    caller.sendall(self._own_message())
                    # Where a machine has several addresses, the system may call from any of them.
                    name = claimed if (claimed, port) in self._others else "".join(names[:1])
                    with self._changed:
                        if name:
                            self._others[name, port].has_called = True
                            self._changed.notify_all()

    def _own_message(self) -> bytes:
        facts = {"packages": dict(self._facts.packages), "files": dict(self._facts.files)}
        message = {"machine": self._own, **facts, "script": self._facts.script, "time": time.time()}
        return json.dumps(message).encode() + b"\n"


def _machine_name(line: bytes) -> str:
    """Return the name that another doctor claims; empty: the message is not from a doctor."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    return str(message.get("machine", "")) if isinstance(message, dict) else ""
