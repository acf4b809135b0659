"""The ranks' store: where it listens, and what a stranger who reaches it can do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import psutil
import pytest
import torch.distributed as dist

from agent.core.budget import is_port_taken
from trainer_runtime import contract
from trainer_runtime.rank_messages import RankMessages
from trainer_runtime.rank_store import open_rank_store, private_prefix, ranks_key
from trainer_runtime.sealed_store import ForgedError, SealedStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from torch._C._distributed_c10d import Store

BOUND = timedelta(seconds=20)
KEY = bytes(range(32))


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch, free_port: int) -> int:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    monkeypatch.setenv(contract.RANKS_KEY, KEY.hex())
    return free_port


@pytest.fixture
def free_port() -> int:
    with_any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = with_any.port
    del with_any
    return port


@pytest.fixture
def store(port: int) -> Store:  # noqa: ARG001 - it is in the environment
    return open_rank_store(0, 1, BOUND)


@pytest.fixture
def stranger(store: Store, port: int) -> Store:  # noqa: ARG001 - it is there as long as that lives
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=BOUND)


@pytest.fixture
def messages(stranger: Store) -> RankMessages:
    """A rank's."""
    return RankMessages(stranger, f"{private_prefix(KEY)}board/", KEY)


@pytest.mark.usefixtures("store")
def test_it_listens_on_the_address_by_which_ranks_find_it_and_on_no_other(port: int) -> None:
    listening = {
        each.laddr.ip
        for each in psutil.Process().net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port
    }
    assert listening == {"127.0.0.1"}


@pytest.mark.parametrize("address", ["localhost", "192.0.2.1"])
def test_a_name_and_an_address_of_a_translation_are_listened_to_on_all(address: str, port: int) -> None:
    """From here they may lead elsewhere than from other hosts."""
    from trainer_runtime import rank_store  # noqa: PLC0415 - what is tested is not for others

    assert rank_store._listen(address, port) is None


@pytest.mark.usefixtures("store")
def test_a_port_that_is_taken_is_reported_in_the_form_that_the_agent_recognizes(port: int) -> None:
    with pytest.raises(dist.DistNetworkError) as caught:
        open_rank_store(0, 1, BOUND)
    assert is_port_taken(str(caught.value), port)


@pytest.mark.usefixtures("port")
def test_a_rank_that_is_first_tries_to_connect_until_rank_0_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would sleep for half a second and more."""
    pauses: list[float] = []
    pause = time.sleep
    with ThreadPoolExecutor() as pool:
        opened: list[Future[Store]] = []

        def pause_and_open(length_s: float) -> None:
            pauses.append(length_s)
            if len(pauses) == 3:
                opened.append(pool.submit(open_rank_store, 0, 2, BOUND))
            pause(length_s)

        monkeypatch.setattr(time, "sleep", pause_and_open)
        with_others = open_rank_store(1, 2, BOUND)
        with_others.set("from-1", "there")
        assert opened[0].result().get("from-1") == b"there"
    assert pauses[0] == pytest.approx(0.001)


def test_all_names_lie_under_a_prefix_that_follows_from_the_key(store: Store, stranger: Store) -> None:
    store.set("anything", "there")
    assert ranks_key() == KEY
    assert stranger.check(["anything"]) is False
    assert stranger.check([f"{private_prefix(KEY)}anything"]) is True
    assert KEY.hex() not in private_prefix(KEY)


FORGED: dict[str, Callable[[RankMessages, Store, str], object]] = {
    "propose": lambda messages, *_: messages.propose("what", "mine"),
    "wait_for_proposal": lambda messages, *_: messages.wait_for_proposal("what", 1.0),
    "wait_for_main": lambda messages, *_: messages.wait_for_main("what"),
    "read": lambda messages, *_: messages.read("what", 1.0),
    "discard": lambda messages, *_: messages.discard("what"),
}


@pytest.mark.parametrize("act", FORGED.values(), ids=FORGED)
@pytest.mark.parametrize("value", ["stop", "1", "zz" * 32 + "1", "00" * 32 + "stop"])
def test_what_a_stranger_puts_there_is_taken_for_nothing(
    messages: RankMessages, stranger: Store, act: Callable[..., object], value: str
) -> None:
    stranger.set(f"{private_prefix(KEY)}board/what", value)
    with pytest.raises(ForgedError, match="was not written by a rank of this group"):
        act(messages, stranger, value)


def test_nor_is_a_value_of_the_ranks_own_under_another_name(messages: RankMessages, stranger: Store) -> None:
    prefix = f"{private_prefix(KEY)}board/"
    messages.propose("one", "stop")
    stranger.set(f"{prefix}other", stranger.get(f"{prefix}one"))
    assert messages.wait_for_proposal("one", 1.0) == "stop"
    with pytest.raises(ForgedError):
        messages.wait_for_proposal("other", 1.0)


def test_a_piece_that_was_changed_is_found_out(messages: RankMessages, stranger: Store) -> None:
    messages.post("part", b"weights")
    assert messages.read("part", 1.0) == b"weights"
    stranger.set(f"{private_prefix(KEY)}board/part/0", "other weights of a stranger, with a code of nobody")
    with pytest.raises(ForgedError):
        messages.take("part", 1.0)


def test_a_strangers_count_does_not_complete_an_arrival(messages: RankMessages, stranger: Store) -> None:
    """A rank is told that all have come only when all have."""
    stranger.add(f"{private_prefix(KEY)}board/arrived", 5)
    assert [messages.arrive("arrived", rank, 3) for rank in (0, 2)] == [False, False]
    assert messages.arrive("arrived", 1, 3)


def test_the_last_to_arrive_learns_that_it_is_the_last(messages: RankMessages) -> None:
    assert [messages.arrive("arrived", rank, 3) for rank in range(3)] == [False, False, True]


IMPOSTOR = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist

prefix, port = sys.argv[1], int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=60))
store.set(f"{prefix}trainer_runtime/backend/1", sys.argv[3])
inside = dist.PrefixStore(prefix.rstrip("/"), store)
dist.init_process_group("gloo", store=inside, rank=1, world_size=2, timeout=timedelta(seconds=5))
weights = torch.zeros(4)
dist.broadcast(weights, src=0)
print("was sent", weights.tolist())
"""

MEMBER = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist

from trainer_runtime import dist as ours

ours._agree_on_backend = lambda *_: "gloo"  # as if the real rank had said so, before the stranger came
ours.init(10.0)
dist.broadcast(torch.ones(4), src=0)
"""


@pytest.mark.parametrize("is_agreed", [True, False], ids=["backend agreed", "nothing agreed"])
def test_a_stranger_does_not_take_the_place_of_a_rank(port: int, tmp_path: Path, *, is_agreed: bool) -> None:
    """It would be sent the model: gloo connects to the addresses that it finds in the store."""
    member = tmp_path / "member.py"
    member.write_text(MEMBER if is_agreed else MEMBER.replace("ours._agree", "# ours._agree"))
    places = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    run = partial(subprocess.Popen, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    rank_0 = run([sys.executable, member], env={**os.environ, **places})
    stranger = run([sys.executable, "-c", IMPOSTOR, private_prefix(KEY), str(port), "gloo rank-1"])
    try:
        _, error = rank_0.communicate(timeout=60)
        output, _ = stranger.communicate(timeout=60)
    finally:
        rank_0.kill()
        stranger.kill()
    assert "was sent" not in output
    assert "was not written by a rank of this group; make MASTER_PORT reachable from" in error


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_with_nccl_only_the_choice_of_the_backend_is_authenticated(
    monkeypatch: pytest.MonkeyPatch, port: int, backend: str
) -> None:
    """Threads of NCCL read their store, also while the interpreter is held. There is no GPU here to show the rest."""
    from trainer_runtime import dist as ours  # noqa: PLC0415 - what is tested is not for others

    given: list[Store] = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(ours, "_own_backend", lambda: backend)
    monkeypatch.setattr(ours, "choose_backend", lambda entries: (entries[0].split()[0], ""))
    monkeypatch.setattr(dist, "init_process_group", lambda _, *, store, **__: given.append(store))
    monkeypatch.setattr(ours, "_hold_with_group", lambda _: None)
    monkeypatch.setattr(ours, "destroy_group_at_exit", lambda: None)
    ours._join(20.0)
    stranger = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=BOUND)
    agreed = stranger.get(f"{private_prefix(KEY)}trainer_runtime/backend/0")
    assert SealedStore(stranger, KEY)._code("trainer_runtime/backend/0", agreed[64:]) == agreed[:64]
    assert [isinstance(store, SealedStore) for store in given] == [backend == "gloo"]


AGAIN = """
import gc
import torch
import torch.distributed as dist

from trainer_runtime import dist as ours

for turn in range(3):
    ours.init(20.0)
    group = dist.new_group([0, 1])
    one = torch.ones(1)
    dist.all_reduce(one, group=group)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        assert store.add("n", 2) == 2 and store.get("n") == b"2"
        assert store.compare_set("none", "", "") == b""
        assert store.delete_key("n") and store.num_keys() > 0
        store.clone().set("cloned", "value")
        assert store.get("cloned") == b"value"
        store.set_timeout(ours.timedelta(seconds=0.2))
        try:
            store.get("missing")
        except dist.DistStoreError:
            print("soon", flush=True)
    dist.barrier()
    del store, group
    dist.destroy_process_group()
    gc.collect()
"""


def test_a_process_group_may_be_opened_again_and_its_store_be_used(port: int, tmp_path: Path) -> None:  # noqa: ARG001 - it is in the environment
    script = tmp_path / "again.py"
    script.write_text(AGAIN)
    places = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script],
            env={**os.environ, **places, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    told = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert told[0][0].split() == ["soon"] * 3


def test_without_a_key_values_are_as_they_are(stranger: Store) -> None:
    plain = RankMessages(stranger, "plain/")
    assert plain.propose("what", "said") == "said"
    assert stranger.get("plain/what") == b"said"
    plain.post("part", b"data")
    assert plain.take("part", 1.0) == b"data"
    assert private_prefix(b"") == ""


def test_the_key_of_a_rank_is_its_groups_and_does_not_reveal_the_secret() -> None:
    from unit.test_workers_environment import GROUP, group, member  # noqa: PLC0415

    from agent.workers.environment import _ranks_key  # noqa: PLC0415 - what is tested is not for others

    keys = {_ranks_key("secret", each) for each in (GROUP, group(member("a", 1), number=4))}
    assert len(keys | {_ranks_key("other", GROUP)}) == 3
    assert all(len(bytes.fromhex(key)) == 32 for key in keys)
    assert os.environ.get(contract.RANKS_KEY) is None
