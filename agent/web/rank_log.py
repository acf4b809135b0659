"""The end of the log of a rank of the current group, read from the agent of its node."""

from __future__ import annotations

from agent.links.frames import LinkBroken
from agent.links.log_reader import LogHost, LogReader, ReadDeclined
from agent.links.queries import FindLogs, ReadLog
from agent.web.hub import KnownJobState

END_BYTES = 64 << 10


class NoLog(Exception):  # noqa: N818 - says what is the case
    """There is no such rank, or its log cannot be read. The message says why."""


async def read_end(known: KnownJobState, rank: int) -> bytes:
    """Return the last whole lines of a rank's log, about `END_BYTES`; of a longer line its end.

    Args:
        known: the job's records.
        rank: of the current group.

    Raises:
        NoLog: there is none, or its agent does not provide it.
    """
    group = known.view.group.value if known.view.group is not None else None
    if group is None or not 0 <= rank < group.world_size:
        raise NoLog(f"the current group has no rank {rank}")
    member = next(each for place, each in enumerate(group.members) if rank < group.first_rank(place) + each.nproc)
    node = known.view.present.get(member.identity)
    if node is None:
        raise NoLog(f"the agent of {member.node_id} is gone")
    reader = LogReader(LogHost.of(node.value), known.secret)
    try:
        found = await reader.find(FindLogs(run=group.run, group=group.number, node_id=member.node_id))
        size = next((each.size_bytes for each in found.logs if each.rank == rank), None)
        if size is None:
            raise NoLog(f"there is no log of rank {rank} in {found.directory}")
        begin = max(0, size - END_BYTES)
        end = b""
        while len(end) < size - begin:
            part = await reader.read(
                ReadLog(run=group.run, group=group.number, node_id=member.node_id, rank=rank, offset=begin + len(end))
            )
            if not part:
                break
            end += part
    except (LinkBroken, ReadDeclined) as error:
        raise NoLog(f"the agent of {member.node_id} does not provide it: {error}") from None
    finally:
        reader.close()
    return (end.partition(b"\n")[2] or end) if begin else end
