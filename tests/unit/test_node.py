"""What a node finds out about its own address, and what it says about one that will not do."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from agent import node_facts
from agent.cli.start import _warn_of_loopback
from agent.config import AgentConfig, JobConfig, NodeConfig, TimingConfig, WorkerConfig
from agent.errors import ConfigError


@pytest.mark.parametrize("address", ["a..b", "no-such-host.invalid", "10.0.0.1:2379", "x" * 300, "a b"])
def test_an_address_that_leads_nowhere_is_refused_in_one_line(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--address: .* cannot be resolved: ") as caught:
        node_facts.resolve(address)
    assert "\n" not in str(caught.value)
    assert repr(address) in str(caught.value)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "0"])
def test_an_address_to_listen_on_is_no_address_of_a_node(address: str) -> None:
    with pytest.raises(ConfigError, match="not where other nodes reach this one"):
        node_facts.resolve(address)


def test_an_address_is_resolved_to_what_it_is() -> None:
    assert node_facts.resolve("10.1.2.3") == ("10.1.2.3",)
    assert node_facts.resolve("fe80::1%lo")[0].startswith("fe80::1")
    assert node_facts.is_loopback(node_facts.resolve("localhost"))


@pytest.mark.parametrize("endpoint", ["a..b:2379", "no-such-host.invalid:2379"])
def test_an_etcd_whose_name_leads_nowhere_is_refused_in_one_line(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"--elastic_server: .* cannot be resolved: ") as caught:
        node_facts.address_towards(endpoint)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("ips", "endpoints", "is_warned_of"),
    [
        (("127.0.1.1",), ("192.0.2.1:2379",), True),
        (("127.0.0.1", "::1"), ("[2001:db8::1]:2379", "a..b:2379"), True),
        (("127.0.0.1",), ("192.0.2.1:2379", "localhost:2379"), False),
        (("::1",), ("[::1]:2379",), False),
        (("127.0.1.1", "10.0.0.1"), ("192.0.2.1:2379",), False),
        (("10.0.0.1",), ("127.0.0.1:2379",), False),
    ],
)
def test_a_loopback_address_is_warned_of_if_etcd_is_elsewhere(
    ips: tuple[str, ...], endpoints: tuple[str, ...], *, is_warned_of: bool
) -> None:
    """A host's own name often leads there. On one machine that is fine."""
    config = AgentConfig(
        endpoints=endpoints,
        store_timeout_s=1.0,
        job=JobConfig("job", 1, 1),
        node=NodeConfig("a", is_node_id_chosen=True, address="this-host", ips=ips, nproc=1),
        timing=TimingConfig(),
        workers=WorkerConfig(("true",), Path("log"), Path("checkpoints"), max_restarts=0),
    )
    with capture_logs() as said:
        _warn_of_loopback(config)
    assert [each["address"] for each in said] == ["this-host"] * is_warned_of
