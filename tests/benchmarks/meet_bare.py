"""Bare clients of etcd, as threads of this process: `meet_bare.py ENDPOINT JOB FIRST:END COUNT`.

Each does the least that an agent must do to meet others: connect, take a lease, put a key under it, read one key, and
watch it. The program is started and answers as `meet_ours.py` does, so that both are measured alike.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agent.store import connections, etcd_protocol
from agent.store.api import KeyRange, Put

_TTL_S = 4
_WITHIN_S = 60.0


def meet(endpoint: str, prefix: str, number: int) -> float:
    """Play one client. Returns when its watch had been created, on the wall clock."""
    link = connections.EtcdConnection(endpoint, None)
    lease = link.lease.LeaseGrant(etcd_protocol.grant_request(_TTL_S), timeout=_WITHIN_S)
    put = etcd_protocol.write_request((), [Put(f"{prefix}{number}", b"here", lease.ID)])
    link.kv.Txn(put, timeout=_WITHIN_S)
    ranges = [KeyRange(f"{prefix}{number}")]
    revision = link.kv.Txn(etcd_protocol.read_request(ranges, prefix), timeout=_WITHIN_S).header.revision
    is_over = threading.Event()

    def requests() -> Iterator[Any]:
        yield from etcd_protocol.watch_requests(ranges, revision)
        is_over.wait()

    stream = link.watch.Watch(requests())
    next(iter(stream))
    at = time.time()
    is_over.set()
    stream.cancel()
    return at


def tell(*words: object) -> None:
    """Write a line to the process that started this one."""
    sys.stdout.write(f"{' '.join(map(str, words))}\n")
    sys.stdout.flush()


def main() -> None:
    """Take part with some clients."""
    endpoint, job_id, mine, _count = sys.argv[1:]
    first, end = map(int, mine.split(":"))
    sys.setswitchinterval(0.5)  # by default each thread that waits for the interpreter wakes 200 times a second
    tell("ready")
    sys.stdin.readline()
    used_before_s = time.process_time()
    with ThreadPoolExecutor(end - first) as pool:
        tasks = [pool.submit(meet, endpoint, f"/bare/{job_id}/", number) for number in range(first, end)]
        at = max(task.result() for task in tasks)
    tell(at, time.process_time() - used_before_s)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
