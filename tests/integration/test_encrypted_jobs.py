"""Whole jobs with certificates that somebody has given: their page is https, their servers and workers speak TLS."""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from authority import Authority
from integration.conftest import PATIENCE_S, PATIENT, ROOT, Job
from machines import environment
from waiting import wait_for

from agent.local_etcd.embedded import EmbeddedEtcd
from trainer_runtime.tls import TlsFiles


def options(files: TlsFiles) -> tuple[str, ...]:
    return (f"--tls_cert={files.cert}", f"--tls_key={files.key}", f"--tls_ca={files.ca}")


def ask(job: Job, command: str, *words: str) -> str:
    """What a command prints, if it can do what it is for."""
    argv = [sys.executable, "-m", "agent", command, f"--elastic_server={job.server}", f"--job_id={job.job_id}", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False).stdout


class Waiting(Job):
    """A job of nodes whose ranks wait."""

    @property
    def command(self) -> list[str]:
        script = self.directory / "wait.py"
        script.write_text("import signal\nprint('it waits', flush=True)\nsignal.pause()\n")
        return [str(script)]


def test_links_and_page_are_encrypted_with_these_certificates(etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="the extra `web` is not installed")
    authority = Authority(tmp_path)
    browser = ssl.create_default_context(cafile=authority.ca)
    with Waiting(tmp_path, etcd.endpoint, tmp_path.name, PATIENT) as job:
        job.join("a", "2", "--http=0", *options(authority.files("a", "127.0.0.1")))
        job.join("b", "2", *options(authority.files("b", "127.0.0.1")))
        wait_for(lambda: '"training"' in ask(job, "status", "--json"), f"both nodes; {job.log_text()}", PATIENCE_S)
        url = urlsplit(json.loads(ask(job, "page", "--json"))["pages"][0]["url"])
        assert url.scheme == "https"

        def is_ready() -> bool:
            connection = http.client.HTTPSConnection(url.netloc, timeout=PATIENCE_S, context=browser)
            connection.request("GET", "/readyz")
            answer = connection.getresponse()
            connection.close()
            return answer.status == 200

        wait_for(is_ready, f"the page; {job.log_text()}", PATIENCE_S)
        plain = http.client.HTTPConnection(url.netloc, timeout=PATIENCE_S)
        plain.request("GET", "/readyz")
        with pytest.raises((http.client.BadStatusLine, ConnectionError)):
            plain.getresponse()
        plain.close()
        assert "it waits" in ask(job, "logs", "--rank=1", "--log_dir=/nowhere"), "of node b's agent, over a link"
        job.nodes["b"].kill()
        told = job.nodes["a"].text
        wait_for(lambda: "lost b" in told(), "the link to break, long before b's lease of 19 s ends", 15.0)


def test_servers_and_workers_speak_tls_by_these_certificates(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    enough = tmp_path / "enough"
    script = str(Path(__file__).with_name("ps_counting.py"))
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}

    def start(files: TlsFiles) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "agent", "--server_num=2", "--worker_num=1", *options(files), script, str(enough)]
        environ = environment(tmp_path, CUDA_VISIBLE_DEVICES="", **paths)
        return subprocess.Popen(line, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True)

    refused = start(authority.files("wrong", "10.0.0.1"))
    _, said = refused.communicate(timeout=PATIENCE_S)
    assert refused.returncode == 2, said
    assert re.search(r"error: --tls_cert=\S+ cannot be used: IP address mismatch, .* not valid for '127.0.0.1'", said)
    node = start(authority.files("right", "127.0.0.1"))
    try:
        log = tmp_path / "log"
        wait_for(
            lambda: any("\nstep 3\n" in path.read_text() for path in log.rglob("workerlog.0")), "steps", PATIENCE_S
        )
        enough.touch()
        _, said = node.communicate(timeout=PATIENCE_S)
        assert node.returncode == 0, said
    finally:
        node.kill()
        node.wait()
