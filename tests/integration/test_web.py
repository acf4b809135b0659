"""The page of a real job in a real browser: it shows a kill and scales the job; and access without the token."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from browsers import Visit, browser_open
from integration.conftest import PATIENCE_S, PATIENT, ROOT, Job, open_store
from prometheus_client.parser import text_string_to_metric_families
from waiting import has_ended

from agent.local_etcd.embedded import EmbeddedEtcd
from agent.rehearse.cluster import LocalNode, read_trace, wait_for
from agent.store.api import KeyRange
from agent.web.access import open_session, token_of

pytest.importorskip("uvicorn", reason="the extra `web` is not installed")

_PATIENCE_MS = 1000 * PATIENCE_S
OWN_TOKEN = "a-token-that-somebody-chose"  # noqa: S105 - of this test


class Served(Job):
    """A job of two nodes that keeps training; node a serves the page."""

    epochs = 50_000
    step_time_s = 0.02
    known: Mapping[str, Any] = {}
    """The output of `elastic-agent page --json`."""

    def begin(self) -> None:
        (self.directory / "token").touch(0o600)
        (self.directory / "token").write_text(OWN_TOKEN)
        self.join("a", "1:3", "--http=0")
        self.join("b", "1:3", "--events=events.jsonl", "--http=0", f"--http_token_file={self.directory}/token")
        self.wait_for_step(5, world=2)
        self.known = json.loads(self.ask("page", "--json"))
        wait_for(self.ready, PATIENCE_S, f"the page; {self.log_text()}")

    @property
    def token(self) -> str:
        return str(self.known["token"])

    @property
    def url(self) -> str:
        return self.url_of("a")

    def url_of(self, name: str) -> str:
        return next(str(page["url"]) for page in self.known["pages"] if page["node_id"] == name)

    def ready(self) -> bool:
        return self.get("/readyz")[0] == 200

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        return self.ask_page("GET", path, headers=headers)

    def ask_page(
        self,
        method: str,
        path: str,
        body: str | None = None,
        headers: dict[str, str] | None = None,
        whence: str = "127.0.0.1",
        name: str = "a",
    ) -> tuple[int, str]:
        """Send a request to a node's page; return the status and the body of the response."""
        netloc = urlsplit(self.url_of(name)).netloc
        connection = http.client.HTTPConnection(netloc, timeout=PATIENCE_S, source_address=(whence, 0))
        try:
            connection.request(
                method, path, body, {name.replace("_", "-"): said for name, said in (headers or {}).items()}
            )
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError:
            return 0, ""
        finally:
            connection.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browser_open() as opened:
        yield opened


@pytest.fixture(scope="module")
def served(etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("served")
    with Served(directory, etcd.endpoint, directory.name, PATIENT) as job:
        job.begin()
        yield job


@pytest.fixture
def visit(browser: Any, served: Served) -> Iterator[Visit]:  # noqa: ANN401 - it may not be installed
    with Visit(browser, f"{served.url}/#token={served.token}") as opened:
        opened.page.set_default_timeout(_PATIENCE_MS)
        until(opened.page, "document.querySelectorAll('.rank.training').length == 2")
        yield opened


def until(page: Any, condition: str) -> None:  # noqa: ANN401 - as above
    """Wait until a condition holds. The wait is outside the page, whose policy allows no foreign scripts."""
    wait_for(lambda: page.evaluate(condition), PATIENCE_S, f"{condition}; {page.inner_text('body')[:2000]}")


def number(visit: Visit, name: str) -> str:
    """Return the number that the page shows under this name."""
    found = visit.page.locator("dt", has_text=name).first.locator("xpath=following-sibling::dd")
    return str(found.text_content())


def web_process(node: LocalNode) -> psutil.Process:
    """Return the process that serves the page."""
    found = [each for each in node.descendants() if "agent.web" in each.cmdline()]
    assert len(found) == 1
    return found[0]


def test_the_page_shows_the_job_and_asks_nobody_else(served: Served, visit: Visit) -> None:
    page = visit.page
    assert page.locator("#name").text_content() == f"Job {served.job_id}"
    assert page.locator("#live").text_content() == "live"
    assert page.url == f"{served.url}/", "the token has left the address"
    assert all(url.startswith((served.url, "data:")) for url in visit.requests)
    before = int(number(visit, "step"))
    until(page, f"Number(document.querySelector('.rank').textContent.split(' ')[1]) > {before + 20}")
    assert page.locator("#nodes tr").count() == 2
    page.hover("#canvas", position={"x": 400, "y": 10})
    until(page, r"/^[ab]: (training|recovering) from .* for .* s$/.test(document.querySelector('#canvas').title)")
    assert visit.said == []


def test_the_loss_is_drawn_as_it_was_committed(served: Served, visit: Visit) -> None:
    page = visit.page
    page.wait_for_selector("#metrics h3")
    until(page, "curves.get('loss').points.length >= 3")
    points = page.evaluate("curves.get('loss').points")
    committed = {(line.group, line.step): line.loss for line in read_trace(served.trace)}
    assert [value for _at, _group, _step, value in points] == [committed[group, step] for _at, group, step, _ in points]
    assert re.fullmatch(r"loss: [\d.e-]+ at step \d+", str(page.locator("#metrics h3").text_content()))
    assert page.evaluate("curves.get('loss').chart.data[1].length") >= 3


def test_the_log_of_a_rank_is_shown_as_it_grows(served: Served, visit: Visit) -> None:
    page = visit.page
    page.select_option("#log-rank", "0")
    shown = "document.querySelector('#log').textContent"
    until(page, f"/epoch/.test({shown})")
    before = page.evaluate(shown)
    until(page, f"{shown} !== {json.dumps(before)}")
    assert page.evaluate("document.querySelector('#log-error').textContent") == ""
    own = {"authorization": f"Bearer {served.token}"}
    assert served.get("/log?rank=0", **own)[1].endswith("\n")
    assert served.get("/log?rank=9", **own) == (404, '{"error":"the current group has no rank 9"}')
    assert served.get("/log?rank=-1", **own)[0] == 400
    page.select_option("#log-rank", "")
    assert page.locator("#log").is_hidden()


def test_a_kill_is_seen_happen_and_explained(served: Served, visit: Visit) -> None:
    known, before = served.status()["group"], int(number(visit, "incidents"))
    served.nodes["b"].kill_worker()
    page = visit.page
    until(page, f"document.querySelector('#incidents details').dataset.group > {known + 1}")  # its node has come back
    until(page, "document.querySelectorAll('.rank.training').length == 2")
    killed = page.locator(f"#incidents details[data-group='{known + 1}']")
    assert "failed" in str(killed.locator(".cause").text_content())
    killed.locator("summary").click()
    assert "SIGKILL" in str(killed.locator("pre").text_content())
    wait_for(lambda: int(number(visit, "incidents")) > before, PATIENCE_S, "the incident to be counted")


def test_the_job_is_scaled_from_the_page(served: Served, visit: Visit) -> None:
    page = visit.page
    page.fill("#np", "1")
    page.click("#scale button")
    until(page, "document.querySelector('#scaled').textContent == 'np 1:3 → 1'")
    until(page, "document.querySelectorAll('.rank').length == 1")
    assert served.status()["world_size"] == 1
    page.fill("#np", "1:3")
    page.press("#np", "Enter")
    until(page, "document.querySelectorAll('.rank.training').length == 2")
    page.evaluate("document.querySelector('#np').removeAttribute('pattern')")
    page.fill("#np", "3:1")
    page.press("#np", "Enter")
    until(page, "document.querySelector('#scaled').textContent.includes('1 <= MIN <= MAX')")
    assert served.status()["np"] == "1:3"


def test_the_page_lives_on_when_its_process_is_killed_and_nothing_else_notices(served: Served, visit: Visit) -> None:
    group = served.status()["group"]
    first = web_process(served.nodes["a"])
    first.kill()
    wait_for(lambda: has_ended(first.pid), PATIENCE_S, "its end")
    wait_for(served.ready, PATIENCE_S, "another to serve")
    step = int(number(visit, "step"))
    until(visit.page, f"Number(document.querySelector('.rank').textContent.split(' ')[1]) > {step}")
    assert served.status()["group"] == group


def test_a_browser_without_a_token_is_asked_for_it_and_a_wrong_one_is_reported(browser: Any, served: Served) -> None:  # noqa: ANN401
    with Visit(browser, served.url) as visit:
        page = visit.page
        page.wait_for_selector("#entry:not([hidden])")
        assert served.job_id not in page.content()
        page.fill("#token", "no such token")
        page.click("#entry button")
        until(page, "document.querySelector('#refused').textContent.startsWith('wrong token')")
        page.fill("#token", served.token)
        page.click("#entry button")
        page.wait_for_selector("#job:not([hidden])")
        cookie = visit.context.cookies()[0]
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        page.reload()
        page.wait_for_selector("#job:not([hidden])")


def test_it_is_never_wider_than_the_screen(browser: Any, served: Served) -> None:  # noqa: ANN401
    with Visit(browser, f"{served.url}/#token={served.token}", color_scheme="dark") as visit:
        visit.page.wait_for_selector("#nodes tr")
        for width in (360, 800, 1600):
            visit.page.set_viewport_size({"width": width, "height": 800})
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
        assert visit.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 31)"


STRANGERS = {
    "nothing": {},
    "no token": {"Authorization": "Bearer"},
    "a wrong one": {"Authorization": "Bearer 0123456789abcdef"},
    "another job's": {"Authorization": f"Bearer {token_of('another')}"},
    "another scheme": {"Authorization": "Basic YTpi"},
    "another job's session": {"Cookie": f"NAME={open_session(token_of('another'), time.time())}"},
    "a session that is over": {"Cookie": "NAME=OVER"},
}


def test_a_stranger_reads_nothing_and_changes_nothing(served: Served) -> None:
    """The responses contain nothing about the job."""
    before = served.status()["np"]
    _, cookie = session(served)
    over = open_session(served.token, time.time() - 1e6)
    for who, given in STRANGERS.items():
        headers = {name: value.replace("NAME", cookie.partition("=")[0]) for name, value in given.items()}
        headers = {name: value.replace("OVER", over) for name, value in headers.items()}
        headers["X-Elastic-Agent"] = "page"
        for method, path in (
            ("GET", "/events"),
            ("GET", "/log?rank=0"),
            ("GET", "/metrics"),
            ("GET", "/session"),
            ("POST", "/np"),
        ):
            body = '{"np": "1"}' if method == "POST" else None
            code, said = served.ask_page(method, path, body, headers, "127.0.0.2")
            assert code in {401, 429}, (who, path, code, said)
            assert served.job_id not in said, who
    assert served.status()["np"] == before


@pytest.mark.long("unit/test_web_access.py")
def test_guesses_of_a_chosen_token_are_slowed_down_and_the_right_one_is_accepted(served: Served) -> None:
    def ask(token: str, whence: str) -> int:
        return served.ask_page("GET", "/session", None, {"Authorization": f"Bearer {token}"}, whence, "b")[0]

    assert [ask(f"guess {number}", "127.0.0.3") for number in range(11)] == [401] * 10 + [429]
    assert ask(OWN_TOKEN, "127.0.0.3") == 204, "as for all others behind the same proxy"
    assert ask("guess 11", "127.0.0.3") == 429
    assert ask(OWN_TOKEN, "127.0.0.4") == 204
    assert ask(served.token, "127.0.0.4") == 401, "the job's own does not count there"


def test_wrong_guesses_do_not_lock_others_out_of_a_page_with_a_derived_token(served: Served) -> None:
    def ask(token: str) -> int:
        return served.ask_page("GET", "/session", None, {"Authorization": f"Bearer {token}"})[0]

    assert [ask("wrong") for _ in range(20)] == [401] * 20
    assert ask(served.token) == 204


def session(served: Served) -> tuple[int, str]:
    """Open a session; return the cookie."""
    connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=PATIENCE_S)
    connection.request("POST", "/session", json.dumps({"token": served.token}))
    answer = connection.getresponse()
    cookie = (answer.getheader("Set-Cookie") or "").partition(";")[0]
    connection.close()
    return answer.status, cookie


def test_another_site_cannot_use_the_browsers_session(served: Served) -> None:
    """Its form cannot send our header, and no response allows its scripts to send requests (CORS)."""
    code, cookie = session(served)
    assert code == 204
    assert served.ask_page("GET", "/session", None, {"Cookie": cookie})[0] == 204
    code, said = served.ask_page("POST", "/np", '{"np": "1"}', {"Cookie": cookie, "Origin": "http://evil.example"})
    assert (code, served.status()["np"]) == (403, "1:3"), said
    connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=PATIENCE_S)
    connection.request("OPTIONS", "/np", headers={"Origin": "http://evil.example"})
    answer = connection.getresponse()
    assert not [name for name, _ in answer.getheaders() if name.lower().startswith("access-control")]
    connection.close()


def test_what_is_no_request_changes_nothing(served: Served) -> None:
    wrong = [
        ("GET", "/np?np=1", None, 405),
        ("POST", "/np", "", 400),
        ("POST", "/np", '{"np": 3}', 400),
        ("POST", "/np", '{"np": "3", "more": 1}', 400),
        ("POST", "/np", '{"np": "0"}', 422),
        ("POST", "/np", '{"np": "' + "1" * 5000 + '"}', 413),
        ("DELETE", "/np", None, 405),
        ("GET", "/../../etc/passwd", None, 404),
        ("GET", "/page.js", None, 404),
    ]
    for method, path, body, code in wrong:
        answered, said = served.ask_page(method, path, body, {"Authorization": f"Bearer {served.token}"})
        assert answered == code, (method, path, said)
    assert served.status()["np"] == "1:3"


def test_credentials_are_nowhere_to_be_seen(served: Served) -> None:
    """Neither in a process's arguments or environment, nor in logs, in the status, or in what the page sends."""
    spec = json.loads(etcd_value(served, "shared/spec"))
    hidden = (served.token, OWN_TOKEN, spec["secret"])
    shown = [served.log_text(), served.ask("status", "--json"), (served.directory / "events.jsonl").read_text()]
    shown += [path.read_text(errors="replace") for path in served.directory.glob("log/**/*.log")]
    shown.append(served.get("/metrics", Authorization=f"Bearer {served.token}")[1])
    for node in served.nodes.values():
        for process in node.descendants():
            shown += [" ".join(process.cmdline()), " ".join(process.environ().values())]
    assert not [secret for secret in hidden if any(secret in each for each in shown)]


def etcd_value(served: Served, key: str) -> bytes:
    with closing(open_store(served.server)) as store:
        (item,) = store.read((KeyRange(f"/elastic-agent/{served.job_id}/{key}"),)).items
        return item.value


def test_events_agree_with_the_records(served: Served) -> None:
    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (served.directory / "events.jsonl").read_text().splitlines()]

    def agrees() -> bool:
        told = [line["incident"] for line in lines() if line["event"] == "incident"]
        return told == served.history()

    wait_for(agrees, PATIENCE_S, f"all incidents; {served.log_text()}")
    assert {line["event"] for line in lines()} >= {"np", "node joined", "group", "checkpoint"}
    assert all(line["job_id"] == served.job_id for line in lines())


def test_the_last_event_is_the_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    argv = [sys.executable, "-m", "agent", "--standalone", "--job_id=short", "--events=events.jsonl", "train.py"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(argv, cwd=tmp_path, env=environ, check=True, capture_output=True, timeout=PATIENCE_S)
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (told[-1]["event"], told[-1]["state"]) == ("ended", "succeeded")


@pytest.mark.skipif(not (shutil.which("jq") and shutil.which("curl")), reason="jq or curl is not installed")
def test_the_documented_webhook_receives_incidents_and_the_end(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "page.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^```bash\n(tail .*?)^```$", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(
        "import pathlib, trainer_runtime as tr\n"
        "tr.init()\n"
        "state = tr.State(best=0.0, save_every=1)\n"
        "for _ in state.epochs(1):\n"
        "    for item in state.steps(range(3)):\n"
        "        state.commit()\n"
        "        if item == 1 and state.group == 1: raise ValueError('once')\n"
    )
    received: list[str] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name is http.server's
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(200)
            self.end_headers()

    (tmp_path / "events.jsonl").touch()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server, ExitStack() as ends:
        Thread(target=server.serve_forever).start()
        ends.callback(server.shutdown)
        command = lines.replace("https://hooks.example.com/mine", f"http://127.0.0.1:{server.server_port}")
        sender = subprocess.Popen(["bash", "-c", command], cwd=tmp_path, start_new_session=True)
        ends.callback(sender.wait)
        ends.callback(os.killpg, sender.pid, signal.SIGKILL)
        tail = wait_for(
            lambda: next((each for each in psutil.Process(sender.pid).children() if each.name() == "tail"), None),
            PATIENCE_S,
            "tail runs",
        )
        wait_for(
            lambda: any(each.path.endswith("events.jsonl") for each in tail.open_files()), PATIENCE_S, "tail follows"
        )
        argv = [sys.executable, "-m", "agent", "--standalone", "--job_id=told", "--events=events.jsonl", "train.py"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(argv, cwd=tmp_path, env=environ, check=True, capture_output=True, timeout=PATIENCE_S)
        wait_for(lambda: len(received) >= 2, PATIENCE_S, "both messages")
    assert len(received) == 2
    assert re.fullmatch(r"told: rank 0 on \S+ exited with code 1 \(ValueError: once\)", received[0])
    assert received[1] == "told: the only rank finished in group 2"


def test_a_flood_leaves_the_training_and_the_probes_alone(served: Served) -> None:
    """Idle connections, bodies that never end, and requests as fast as they are answered."""
    group = served.status()["group"]
    host, port = urlsplit(served.url).netloc.split(":")
    endless = b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n"
    with ExitStack() as held:
        for number in range(600):
            caller = held.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S))
            if number % 2:
                with suppress(OSError):
                    caller.sendall(endless)
                    caller.recv(4096)
                    caller.sendall(b"x")
        until = time.monotonic() + 5.0
        while time.monotonic() < until:
            assert served.get("/metrics")[0] == 401
        last = read_trace(served.trace)[-1].step
        served.wait_for_step(last + 20)
        assert served.ready()
        assert len(web_process(served.nodes["a"]).net_connections("tcp")) < 400, "it is bounded"
    assert served.status()["group"] == group


def test_what_strangers_send_does_not_fill_the_log(served: Served) -> None:
    host, port = urlsplit(served.url).netloc.split(":")
    before = len(served.nodes["a"].text())
    for words in (b"rubbish\r\n\r\n", b"POST /session HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"):
        for _ in range(30):
            with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as caller:
                caller.sendall(words)
    assert served.ready()
    assert len(served.nodes["a"].text()) - before < 1000


def test_the_probes_report_an_agent_that_hangs(served: Served) -> None:
    """The node is removed from the group; the probe reports the hang for as long as it lasts."""
    assert served.get("/healthz")[0] == 200
    host, port = urlsplit(served.url_of("b")).netloc.split(":")
    agent = psutil.Process(served.nodes["b"].process.pid)

    def ask(path: str) -> int:
        connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
        connection.request("GET", path)
        with closing(connection):
            return connection.getresponse().status

    agent.suspend()
    try:
        wait_for(lambda: ask("/readyz") == 503, PATIENCE_S, "it to lose its place")
        assert ask("/healthz") == 503
    finally:
        agent.resume()
    wait_for(lambda: ask("/readyz") == ask("/healthz") == 200, PATIENCE_S, "it to be back")


def test_the_metrics_agree_with_the_records(served: Served) -> None:
    """They describe the incidents of this module's earlier tests, or none if this test runs alone."""

    def scraped() -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families(served.get("/metrics", Authorization=f"Bearer {served.token}")[1])
        samples = [sample for family in families for sample in family.samples]
        assert all(sample.labels.pop("job_id") == served.job_id for sample in samples)
        return {(each.name, *each.labels.values()): each.value for each in samples}

    def agree() -> bool:
        told, found = served.history(), scraped()
        return (
            found["elastic_agent_run_incidents",] == len(told) - 1
            and found["elastic_agent_run_replayed_steps",] == sum(each["replayed_steps"] for each in told)
            and found["elastic_agent_group",] == told[-1]["group"]
            and found["elastic_agent_nodes", "training"] == 2  # the one that hung in another test is back
        )

    wait_for(agree, PATIENCE_S, f"an agreement; {scraped()}")
    assert scraped()["elastic_agent_checkpoint_size_bytes",] > 0
    assert scraped()["elastic_agent_alive",] == 1
