"""The commands of docs/security.md, as they stand there; and what a stranger gets from an etcd that is set up so."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.conftest import PATIENCE_S, ROOT
from ports import free_ports

from agent.rehearse.cluster import wait_for

SCRIPT = "import os; assert not [name for name in os.environ if 'ETCD' in name]; print('trained')"

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("etcd", "etcdctl", "openssl"))) and os.environ.get("CI") != "true",
    reason="needs etcd, etcdctl and openssl on PATH",
)


class SecuredCluster:
    """An etcd that is set up by the page's commands, in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
        client, peer = free_ports(2)
        blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        certificates, self.etcd, self.roles, self.job = (each.replace("2379", str(client)) for each in blocks)
        self.peers = f"http://127.0.0.1:{peer}"
        self.directory = directory
        command = directory / "elastic-agent"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m agent "$@"\n')
        command.chmod(0o755)
        (directory / "train.py").write_text(SCRIPT)
        self.environ = {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        self.run(certificates)

    @property
    def as_root(self) -> str:
        """What comes before a command of the administrator's."""
        return self.roles.partition("as_root user add")[0]

    def run(self, commands: str, *, may_fail: bool = False) -> subprocess.CompletedProcess[str]:
        """As a user types them."""
        argv = ["bash", "-euo", "pipefail", "-c", commands]
        done = subprocess.run(
            argv,
            cwd=self.directory,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert may_fail or done.returncode == 0, f"{done.stdout}{done.stderr}"
        return done

    def is_up(self) -> bool:
        return self.run(f"{self.as_root}as_root endpoint health", may_fail=True).returncode == 0


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    made = SecuredCluster(tmp_path_factory.mktemp("secured"))
    peers = f"--listen-peer-urls={made.peers} --initial-advertise-peer-urls={made.peers}"
    argv = ["bash", "-c", f"exec {made.etcd.rstrip()} {peers} --initial-cluster=default={made.peers}"]
    with (made.directory / "etcd.out").open("wb") as out:
        etcd = subprocess.Popen(argv, cwd=made.directory, stdout=out, stderr=out)
    try:
        wait_for(made.is_up, PATIENCE_S, "etcd to serve")
        made.run(made.roles)
        yield made
    finally:
        etcd.kill()
        etcd.wait()


def test_a_job_trains_with_its_certificate(secured: SecuredCluster) -> None:
    assert "trained" in secured.run(secured.job).stdout


def test_another_jobs_keys_are_not_for_this_certificate(secured: SecuredCluster) -> None:
    done = secured.run(secured.job.replace("--job_id=resnet", "--job_id=another"), may_fail=True)
    assert done.returncode == 2
    assert "/elastic-agent/another/" in done.stderr
    assert "trained" not in done.stdout


def test_a_client_without_a_certificate_gets_an_error_that_says_so(secured: SecuredCluster) -> None:
    job = secured.job.replace("--etcd_cert=resnet.crt --etcd_key=resnet.key", "--store_timeout=2")
    done = secured.run(job, may_fail=True)
    assert done.returncode == 69
    assert "--etcd_cert is missing" in done.stderr
    assert "trained" not in done.stdout


def test_a_client_without_tls_gets_an_error_that_says_so(secured: SecuredCluster) -> None:
    job = re.sub(r"--etcd_\w+=\S+", "", secured.job.replace("https://", "http://"))
    done = secured.run(job.replace("--np=1", "--np=1 --store_timeout=2"), may_fail=True)
    assert done.returncode == 69
    assert "https://" in done.stderr
    assert "trained" not in done.stdout


def test_no_key_is_readable_without_a_certificate(secured: SecuredCluster) -> None:
    as_nobody = secured.as_root.replace("--cert=root.crt --key=root.key", "--command-timeout=2s")
    done = secured.run(f"{as_nobody}as_root get --prefix /", may_fail=True)
    assert done.returncode != 0
    assert "resnet" not in done.stdout
