"""The page on security: each line of what others can still do has a test, and some of these tests are here."""

from __future__ import annotations

import os
import re
import socket
import stat
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from agent.workers.channel import Channel
from trainer_runtime.resume import StartingPoint
from trainer_runtime.writer import Content, Writer

ROOT = Path(__file__).resolve().parents[2]
_HEADING = "## What others can still do"
_TEST = re.compile(r"`(\w+/test_\w+\.py)::(test_\w+)`")
BOUND = timedelta(seconds=30)


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without the table's head."""
    below = text.split(f"\n{heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in below.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
LEFT = rows(PAGE, _HEADING)


@pytest.mark.parametrize("row", LEFT, ids=[row[0][:40] for row in LEFT])
def test_each_line_names_a_test_that_is_there(row: list[str]) -> None:
    where, stranger, user, tests = row
    assert all((where, stranger, user)), "nothing is left out"
    named = _TEST.findall(tests)
    assert named, f"no test is named for {where!r}"
    for file, name in named:
        path = ROOT / "tests" / file
        assert path.is_file(), file
        assert re.search(rf"^(?:async )?def {name}\(", path.read_text(encoding="utf-8"), re.MULTILINE), (
            f"{file} has no {name}"
        )


def test_each_way_in_has_a_line() -> None:
    """As the threat model lists them, in its order and words."""
    ways = [row[0].partition(" (")[0] for row in rows(PAGE, "## The threat model, on a page")]
    assert len(ways) > 5
    told = [row[0].partition(" (")[0].partition(",")[0] for row in LEFT]
    assert not [way for way in ways if way.partition(",")[0] not in told]


def test_a_table_without_a_test_is_found_out() -> None:
    text = "\n## A\n\n| a | b | c | test |\n|---|---|---|---|\n| x | y | z | by hand |\n\n## B\n| no | row |\n"
    assert rows(text, "## A") == [["x", "y", "z", "by hand"]]
    assert not _TEST.findall("by hand")


# Below: what torch, and the user, leave open. Should one of these fail, the page can promise more.


def listening() -> set[tuple[str, int]]:
    return {each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}


@pytest.fixture
def own_store() -> dist.Store:
    """As a script's own `init_process_group` opens it."""
    return dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False, timeout=BOUND)


def test_the_store_that_a_script_opens_itself_accepts_any_client(own_store: dist.TCPStore) -> None:
    """On all interfaces, and without a secret."""
    assert {each for each, port in listening() if port == own_store.port} <= {"::", "0.0.0.0"}
    stranger = dist.TCPStore("127.0.0.1", own_store.port, is_master=False, wait_for_workers=False, timeout=BOUND)
    own_store.set("weights", "mine")  # sets are not answered: each is seen by its own connection before the next
    assert own_store.get("weights") == b"mine"
    stranger.set("weights", "another's")
    assert stranger.get("weights") == b"another's"
    assert own_store.get("weights") == b"another's"


def test_the_ranks_own_ports_accept_any_client(own_store: dist.TCPStore) -> None:
    """Gloo's here: a connection is accepted before anything is known of who calls."""
    before = listening()
    group = dist.ProcessGroupGloo(own_store, 0, 1, BOUND)
    group.barrier().wait()
    opened = listening() - before
    assert opened
    for host, port in opened:
        socket.create_connection((host, port), timeout=30).close()


def test_the_sockets_between_agent_and_worker_have_no_name() -> None:
    """Nobody can call them, on the network or by a path: who has one has inherited it."""
    channel = Channel()
    sockets = {each.fd: each for each in psutil.Process().net_connections("all")}
    theirs = sockets[channel.theirs.fileno()]
    assert (theirs.family, theirs.laddr) == (socket.AF_UNIX, "")
    channel.theirs.close()
    channel.close()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_checkpoint_is_readable_as_the_umask_says(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        writer = Writer(tmp_path, "us", 1, keep=2, start=StartingPoint())
        writer.write(Content({"w": torch.ones(3)}), step=1, world_size=1, metrics={})
        assert writer.finish()
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"state.pt", "manifest.json"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {mode}
