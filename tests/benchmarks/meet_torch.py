"""Agents of torch's dynamic rendezvous, as threads of this process: `meet_torch.py ENDPOINT JOB FIRST:END COUNT`.

The process with the first agent holds the store. Says "ready", waits for a line, and prints when the last of its own
agents had the group, on the wall clock, and the processor time that this took in all of them.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # at its best


def meet(host: str, port: int, job_id: str, count: int) -> float:
    """Join; return when the world was there."""
    store = TCPStore(host, port, is_master=False, wait_for_workers=False)
    parameters = RendezvousParameters("c10d", f"{host}:{port}", job_id, count, count, local_addr=host)
    handler = create_handler(store, C10dRendezvousBackend(store, job_id), parameters)
    info = handler.next_rendezvous()
    assert info.world_size == count
    return time.time()


def tell(*words: object) -> None:
    """To who started this process."""
    sys.stdout.write(f"{' '.join(map(str, words))}\n")
    sys.stdout.flush()


def main() -> None:
    """Take part with some agents."""
    endpoint, job_id, mine, count = sys.argv[1:]
    host, _, port = endpoint.partition(":")
    first, end = map(int, mine.split(":"))
    server = TCPStore(host, int(port), is_master=True, wait_for_workers=False) if first == 0 else None
    sys.setswitchinterval(0.5)  # by default each thread that waits for the interpreter wakes 200 times a second
    tell("ready")
    sys.stdin.readline()
    used_before_s = time.process_time()
    with ThreadPoolExecutor(end - first) as pool:
        tasks = [pool.submit(meet, host, int(port), job_id, int(count)) for _ in range(first, end)]
        tell(max(task.result() for task in tasks), time.process_time() - used_before_s)
        sys.stdin.readline()  # the store lives until all have met
    del server


if __name__ == "__main__":
    main()
