"""A real Prometheus scrapes a job with faults: its values agree with the job's records."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from integration.conftest import PATIENCE_S, PATIENT, Job
from ports import free_port

from agent.local_etcd.embedded import EmbeddedEtcd
from agent.rehearse.cluster import wait_for

_PROMETHEUS = shutil.which("prometheus")
_TOKEN = "a-token-for-all-of-our-jobs"  # noqa: S105 - of this test
Query = Callable[[str], dict[str, float]]
"""The value of an expression in Prometheus, by the value of its only label."""

_CONFIG = """
global: {{scrape_interval: 200ms}}
scrape_configs:
  - job_name: elastic-agent
    authorization: {{credentials_file: {token}}}
    static_configs: [{{targets: ["{target}"]}}]
"""


@contextmanager
def watching(directory: Path, target: str) -> Iterator[Query]:
    """Run Prometheus until the end of the block."""
    assert _PROMETHEUS is not None
    (directory / "token").write_text(_TOKEN)
    (directory / "prometheus.yml").write_text(_CONFIG.format(token=directory / "token", target=target))
    address = f"127.0.0.1:{free_port()}"
    argv = [_PROMETHEUS, f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/tsdb"]
    with (directory / "prometheus.out").open("wb") as out:
        process = subprocess.Popen([*argv, f"--web.listen-address={address}"], stdout=out, stderr=out)

    def query(expression: str) -> dict[str, float]:
        url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except OSError:
            return {}  # it is not up yet
        return {next(iter(each["metric"].values()), ""): float(each["value"][1]) for each in found}

    try:
        yield query
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


@pytest.mark.long("test_web.py: the metrics agree with the records")
@pytest.mark.skipif(
    _PROMETHEUS is None and os.environ.get("CI") != "true",
    reason="no prometheus on PATH (scripts/system-packages installs it)",
)
def test_what_prometheus_has_seen_agrees_with_the_records(etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    (tmp_path / "agent-token").touch(0o600)
    (tmp_path / "agent-token").write_text(f"{_TOKEN}\n")
    with Job(tmp_path, etcd.endpoint, tmp_path.name, PATIENT) as job:
        job.epochs, job.step_time_s = 50_000, 0.02
        job.join("a", "1:3", "--http=0", f"--http_token_file={tmp_path}/agent-token")
        job.join("b", "1:3")
        job.wait_for_step(5, world=2)
        (page,) = json.loads(job.ask("page", "--json"))["pages"]
        assert page["has_own_token"]
        with watching(tmp_path, urllib.parse.urlsplit(page["url"]).netloc) as query:

            def group() -> float:
                return query("max(elastic_agent_group)").get("", 0.0)

            def scraped(more: int) -> bool:
                newest = job.history()
                is_over = newest[-1]["phases"]["first_step_s"] is not None
                counted = sum(query("max by (cause) (elastic_agent_incidents_total)").values())
                return is_over and len(newest) > more and counted == len(newest) - 1 and group() == newest[-1]["group"]

            wait_for(lambda: group() == 1, PATIENCE_S, f"the first scrape; {job.log_text()}")
            job.nodes["b"].kill_worker()
            wait_for(lambda: scraped(1), PATIENCE_S, f"the failure to be counted; {job.log_text()}")
            job.nodes["b"].kill()
            wait_for(lambda: scraped(2), PATIENCE_S, f"the loss to be counted; {job.log_text()}")
            told = [each for each in job.history() if each["cause"] != "start"]
            for cause, number in query("max by (cause) (elastic_agent_incidents_total)").items():
                assert number == sum(each["cause"] == cause for each in told)
            lost = query("sum by (phase) (elastic_agent_phase_seconds_sum)")
            for phase in ("detect", "stop", "first_step"):
                assert lost[phase] == pytest.approx(sum(each["phases"][f"{phase}_s"] or 0.0 for each in told))
            replayed = query("max(elastic_agent_replayed_steps_total)")[""]
            assert replayed == sum(each["replayed_steps"] for each in told)
