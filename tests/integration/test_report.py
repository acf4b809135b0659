"""The report of a real job in a real browser, and the replay of its incidents."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import Visit, browser_open
from integration.conftest import PATIENCE_S, PATIENT, Job
from records import Run, ended
from simulation.replay import read, replay

from agent.core.reasons import HealthCheckFailed, NodesLost
from agent.local_etcd.embedded import EmbeddedEtcd
from agent.rehearse.cluster import wait_for

figures = pytest.importorskip("agent.observe.report.figures", reason="the extra `report` is not installed")
from agent.observe.report import page  # noqa: E402 - draws, too

_CAUSES = ("start", "failed", "join", "lost", "scale")
_EVIL = "<img src=x onerror=\"document.title='taken over'\"><script>document.title = 'taken over'</script>"


def wait_for_incident(job: Job, cause: str) -> None:
    """Wait until the newest incident has this cause and every rank has made a step."""

    def has_come() -> bool:
        newest = job.history()[-1]
        return newest["cause"] == cause and newest["phases"]["first_step_s"] is not None

    wait_for(has_come, PATIENCE_S, f"an incident of cause {cause}; {job.history()}")


@pytest.fixture(scope="module")
def told(etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job that keeps training after one incident of each of these causes."""
    directory = tmp_path_factory.mktemp("report")
    options = (*PATIENT, "--settle=60")  # all of them are in the first group
    with Job(directory, etcd.endpoint, directory.name, options) as job:
        job.epochs = 20_000
        for name in ("a", "b", "c"):
            job.join(name, "1:3")
        job.wait_for_step(5, world=3)
        job.nodes["b"].kill_worker()
        wait_for_incident(job, "join")  # the others went on without its node, and it came back
        job.nodes["c"].kill()
        wait_for_incident(job, "lost")
        job.scale("1")
        wait_for_incident(job, "scale")
        yield job


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browser_open() as opened:
        yield opened


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A report of records whose texts are markup."""
    run = Run("a", "b", "c")
    failed = ended("b", 1, error=_EVIL, traceback=f"Traceback (most recent call last):\n{_EVIL}")
    run.add("failed", 60.0, ("a", "b", "c"), ended=(failed,), replayed_steps=3, step_s=0.5, step=12)
    run.add(
        "lost", 120.0, ("a", "c"), reason=NodesLost(node_ids=("b",), unfit=(("b", HealthCheckFailed(trouble=_EVIL)),))
    )
    history = run.history(300.0, job_id=_EVIL)
    path = tmp_path / "report.html"
    path.write_text(page.page(history, figures.draw(history)), encoding="utf-8")
    return path


def test_a_page_opens_from_its_file_and_asks_for_nothing_else(browser: Any, made: Path) -> None:  # noqa: ANN401
    """Text of records is never markup."""
    with Visit(browser, made.as_uri()) as visit:
        assert visit.requests == [made.as_uri()]
        assert visit.said == []
        assert visit.page.title() == f"elastic-agent: job {_EVIL}"
        assert visit.page.locator("script, img").count() == 0


@pytest.mark.parametrize("width", [360, 800, 1600])
def test_a_page_is_never_wider_than_the_screen(browser: Any, made: Path, width: int) -> None:  # noqa: ANN401
    """Wide figures scroll within their own area."""
    with Visit(browser, made.as_uri(), viewport={"width": width, "height": 800}) as visit:
        visit.page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_page_is_light_or_dark_as_the_screen_is_and_light_on_paper(browser: Any, made: Path) -> None:  # noqa: ANN401
    """The figures too, since they use the page's colour variables."""
    seen = {}
    for scheme, medium in (("light", "screen"), ("dark", "screen"), ("dark", "print")):
        with Visit(browser, made.as_uri(), color_scheme=scheme) as visit:
            visit.page.emulate_media(media=medium, color_scheme=scheme)
            text = visit.page.locator("figure svg text").first
            seen[scheme, medium] = (
                visit.page.evaluate("getComputedStyle(document.body).backgroundColor"),
                text.evaluate("each => getComputedStyle(each).fill"),
            )
    assert seen["light", "screen"] == ("rgb(255, 255, 255)", "rgb(92, 102, 117)")
    assert seen["dark", "screen"] == ("rgb(20, 24, 31)", "rgb(163, 173, 187)")
    assert seen["dark", "print"] == seen["light", "screen"]


def test_incidents_unfold_by_hand_and_from_the_figures_and_on_paper(browser: Any, made: Path) -> None:  # noqa: ANN401
    with Visit(browser, made.as_uri()) as visit:
        quoted = visit.page.locator("#incident-2 pre")
        assert not quoted.is_visible()
        visit.page.locator(".incident summary").nth(1).click()
        assert quoted.is_visible()
        assert quoted.inner_text() == f"Traceback (most recent call last):\n{_EVIL}"
        assert not visit.page.locator("#incident-3").is_visible()
        visit.page.locator("figure svg a").nth(2).click()
        visit.page.locator("#incident-3").wait_for(state="visible", timeout=60_000)
        assert visit.page.url.endswith("#incident-3")
    with Visit(browser, made.as_uri()) as visit:
        visit.page.emulate_media(media="print")
        assert visit.page.locator("#incident-2 pre").is_visible()


def test_a_real_job_has_a_report(told: Job, browser: Any) -> None:  # noqa: ANN401
    """With its nodes, causes and downtime; as a page and as a picture."""
    answer = json.loads(told.ask("report", "--out=page.html", "--png=picture.png", "--json"))
    assert (answer["out"], answer["png"]) == ("page.html", "picture.png")
    assert answer["statistics"]["incidents"] == len(_CAUSES) - 1
    assert 0.0 < answer["statistics"]["goodput"] < 1.0
    with Visit(browser, (told.directory / "page.html").as_uri(), viewport={"width": 1200, "height": 900}) as visit:
        shown = visit.page.locator("body").inner_text()
        causes = visit.page.locator("details.incident .cause").all_inner_texts()
        labels = visit.page.locator("figure").first.locator("svg text").all_text_contents()
        sizes = [each.bounding_box() for each in visit.page.locator("figure svg").all()]
    assert causes == list(_CAUSES)
    assert "on b was killed by SIGKILL" in shown
    assert {"a", "b", "c"} <= set(labels)
    assert all(size is not None and size["width"] > 1000 for size in sizes)
    assert (told.directory / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_incidents_of_a_real_job_come_again_in_the_simulation(told: Job) -> None:
    """Each replay has the same cause, concerns the same nodes, and leads to the same members."""
    for group, cause in enumerate(_CAUSES, start=1):
        told.ask("incident", "export", str(group), f"--out=incident-{group}.json")
        situation = read(told.directory / f"incident-{group}.json")
        assert replay(situation).group.cause == cause
    assert json.loads(told.ask("incident", "export"))["incident"]["cause"] == _CAUSES[-1], (
        "the newest, if none is named"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("incident", "export", "77"), "has no record of group 77; recorded groups: 1, 2, 3, 4, 5"),
        (("incident", "export", "x"), "'x' is not a valid integer"),
        (("incident", "export", "--out=no/such/file"), "no/such/file cannot be written: No such file or directory"),
        (("incident", "import"), "'import' is not 'export'"),
        (("report", "--out=no/such/file"), "no/such/file cannot be written: No such file or directory"),
        (("report", "--out=."), "is a directory"),
    ],
)
def test_mistakes_are_answered_in_a_line(told: Job, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        told.ask(*words)
    assert caught.value.returncode == 2
    assert said in caught.value.stderr
    assert caught.value.stderr.count("\n") == 1
