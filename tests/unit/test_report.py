"""The report's page and picture."""

from __future__ import annotations

import re
import struct
import sys
from html.parser import HTMLParser

import pytest
from reasons import FINISHED, lost
from records import BEGAN_AT, Run, ended

from agent.core.incident import Phases
from agent.core.model import Group, Result
from agent.core.reasons import HealthCheckFailed, NodesLost, Requested
from agent.errors import ConfigError
from agent.observe.report.palette import DARK, LIGHT
from agent.observe.report.run_history import RunHistory
from agent.operate.exports import report_job

figures = pytest.importorskip("agent.observe.report.figures", reason="the extra `report` is not installed")
from agent.observe.report import page  # noqa: E402 - draws, too
from agent.observe.report.page import Html, join, tag  # noqa: E402 - likewise

EVIL = "<script>alert('nan')</script> & \"co\" $x^2$ --> ]]>"
VOID = {"meta"}


class Page(HTMLParser):
    """A parsed page: its elements, and the text in each kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.texts.setdefault(tag, [])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for each in set(self.open):
            self.texts[each].append(data)

    def text(self, tag: str) -> str:
        return " ".join(" ".join(self.texts.get(tag, [])).split())


def make(history: RunHistory) -> str:
    return page.page(history, figures.draw(history))


def run() -> Run:
    made = Run("node-a", "node-b")
    first = ended("node-b", 1, error=EVIL, traceback=f"Traceback (most recent call last):\n  {EVIL}\n")
    died = ended("node-a", 0, after_s=0.12, error_s=0.001, is_peer_lost=True, tail="Connection closed by peer")
    either = ended("node-a", 0, after_s=0.001, error_s=0.003, signal=9, exit_code=None, why="memory ran out")
    made.add("failed", 60.0, ("node-a", "node-b"), ended=(first, died), step=40, replayed_steps=3, step_s=0.5)
    made.add(
        "failed",
        90.0,
        ("node-a", "node-b"),
        ended=(first, either),
        reason=NodesLost(node_ids=("x",), unfit=(("x", HealthCheckFailed(trouble=EVIL)),)),
    )
    made.add("lost", 120.0, ("node-a",), reason=lost("node-b"))
    return made


def test_an_incident_has_cause_consequences_phases_members_and_the_resume_step() -> None:
    text = Page(make(run().history(200.0))).text("details")
    for said in (
        "First cause rank 1 on node-b exited with code 1",
        "Traceback (most recent call last):",
        "Failed as a result rank 0 on node-a exited with code 1, 0.1 s later. Connection closed by peer",
        "rank 0 on node-a was killed by SIGKILL: memory ran out, within 4 ms of the first; either may be the cause.",
        "detect 0.5 s",
        "replayed steps 1.5 s",
        "node-a (rank 0), node-b (rank 1).",
        "node-a (rank 0); node-b left.",
        "after step 40; 3 replayed steps (1.5 s of work).",
    ):
        assert said in text, said


def test_the_page_has_the_totals() -> None:
    text = Page(make(run().history(200.0))).text("dl")
    assert text == "goodput 93.9 % downtime 12.0 s incidents 3 replayed steps 3"


def test_text_of_records_is_never_markup() -> None:
    """A job's tracebacks, reasons and errors may contain anything."""
    made = Page(make(run().history(200.0, job_id="<b>job</b>")))
    assert EVIL in made.text("pre")
    assert "script" not in made.texts
    assert "b" not in made.texts
    assert not [name for _, name, _ in made.attributes if name.startswith("on")]


def test_the_page_loads_nothing() -> None:
    """Every reference is within the page, styles contain no address, and the policy forbids loading anything."""
    made = Page(make(run().history(200.0)))
    targets = {value for _, name, value in made.attributes if name == "id"}
    for tag_name, name, value in made.attributes:
        if name in {"href", "xlink:href", "src"}:
            assert value.startswith("#"), f"{tag_name} {name}={value}"
            assert value[1:] in targets
    assert not re.findall(r"url\((?!#)", made.text("style"))
    assert "@import" not in made.text("style")
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'") in made.attributes


def test_every_incident_can_be_reached_from_the_figures() -> None:
    made = Page(make(run().history(200.0)))
    links = {value for _, name, value in made.attributes if name == "xlink:href" and "incident" in value}
    assert links == {"#incident-1", "#incident-2", "#incident-3", "#incident-4"}


def test_the_figures_use_the_colour_variables_of_the_page() -> None:
    """So that a dark theme applies to them."""
    text = make(run().history(200.0))
    drawn = text[text.index("<svg") :]
    assert not [colour for colour in LIGHT.values() if colour in drawn]
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawn)) <= {"#000000"}, "matplotlib's own default is left nowhere else"
    used = set(re.findall(r"var\(--([a-z-]+)\)", text))
    assert used <= set(LIGHT)
    assert set(LIGHT) == set(DARK)
    assert len(set(LIGHT.values())) == len(LIGHT), "else one would be taken for the other"


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_have_enough_contrast_to_the_background(palette: dict[str, str]) -> None:
    """WCAG 2.2: criterion 1.4.3 for text, 1.4.11 for graphics."""
    for name in set(palette) - {"paper", "line"}:
        asked = 4.5 if name in ("ink", "faint", "fault", "planned") else 3.0
        assert contrast(palette[name], palette["paper"]) >= asked, name


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_equal_records_give_equal_files() -> None:
    def both() -> tuple[str, bytes]:
        history = run().history(200.0)
        drawn = figures.draw(history)
        return page.page(history, drawn), figures.png([figures.headline(page.headlines(history)), drawn.timeline])

    assert both() == both()


def size_of(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


def test_the_picture_has_the_totals_and_the_same_figures() -> None:
    history = run().history(200.0)
    drawn = figures.draw(history)
    whole = size_of(figures.png([figures.headline(page.headlines(history)), drawn.timeline, drawn.downtime]))
    assert whole[0] == 1200
    assert whole[1] == sum(size_of(figures.png([each]))[1] for each in (drawn.timeline, drawn.downtime)) + 135
    assert "goodput 93.9 %" in page.headlines(history)[1]


def test_a_job_that_has_not_begun_has_a_report() -> None:
    history = Run("a").history(10.0)
    nothing = RunHistory(
        job_id="job", spec=history.spec, group=None, result=None, incidents=(), present=frozenset(), now=BEGAN_AT
    )
    assert "None yet" in make(nothing)
    assert figures.png([figures.headline(page.headlines(nothing))])


def test_an_undisturbed_job_has_a_timeline_and_no_downtime() -> None:
    made = Page(make(Run("a").history(50.0)))
    assert made.text("h2") == "What happened Incidents"
    assert "100.0 %" in made.text("dl")


def test_the_result_of_a_job_is_shown_with_its_summary() -> None:
    result = Result(
        run="r1", group=4, succeeded=False, exit_code=3, reason=FINISHED, summary="it cost a lot", at=BEGAN_AT
    )
    text = Page(make(run().history(200.0, result=result))).text("header")
    assert text.endswith("The job has failed: all 2 ranks finished in group 1. it cost a lot.")


def test_a_job_that_was_stopped_has_not_failed() -> None:
    result = Result(
        run="r1", group=4, succeeded=False, exit_code=0, reason=Requested(what="stop", by="ops"), at=BEGAN_AT + 200.0
    )
    assert Page(make(run().history(300.0, result=result))).text("span").startswith("stopped")


def test_a_note_shows_that_older_incidents_are_not_kept() -> None:
    made = run()
    del made.incidents[:2]
    text = make(made.history(200.0))
    assert "Only the newest 200 incidents are kept" in text
    assert Page(text).text("dl").startswith("goodput"), "and the sums are of the whole run"
    assert "since the oldest incident shown" in text


def test_the_reason_of_the_group_is_shown_while_it_trains() -> None:
    group = Group(run="r1", number=4, members=(), cause="lost", reason=lost("node-b"), restarts=0, step=0, reached=2)
    assert "Group 4, cause lost: lost node-b." in make(run().history(200.0, group=group))


@pytest.mark.parametrize(("nodes", "incidents"), [(1, 200), (200, 2), (200, 60)])
def test_many_nodes_and_incidents_have_a_row_each(nodes: int, incidents: int) -> None:
    """Rows become smaller down to a limit: names have at least 8 pixels in the picture."""
    names = tuple(f"node-{index:03d}" for index in range(nodes))
    made = Run(*names)
    for index in range(incidents - 1):
        made.add("failed", 60.0 * (index + 1), names, ended=(ended(names[index % nodes], index % nodes),))
    drawn = figures.draw(made.history(60.0 * (incidents + 1)))
    text = figures.svg(drawn.timeline, "t") + figures.svg(drawn.downtime, "l")
    assert all(f">{name}<" in text for name in names)
    assert text.count(": failed<") == incidents - 1
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", text)]
    assert min(sizes) * 120 / 72 >= 8.0
    assert len(text) < 3_000_000


def test_one_long_incident_does_not_flatten_the_others() -> None:
    made = run()
    made.add("wait", 150.0, (), reason=lost("node-a"), phases=Phases(detect_s=1.0, agree_s=0.0))
    text = figures.svg(figures.draw(made.history(9000.0)).downtime, "l")
    assert "» 2 h 28 min" in text


@pytest.mark.parametrize(
    ("until_s", "said", "name"),
    [
        (0.5, ["0", "0.1", "0.2", "0.3", "0.4", "0.5"], "seconds"),
        (45.0, ["0", "10", "20", "30", "40"], "seconds"),
        (400.0, ["0:00", "1:00", "2:00", "3:00", "4:00", "5:00", "6:00"], "minutes:seconds"),
        (20000.0, ["0:00", "1:00", "2:00", "3:00", "4:00", "5:00"], "hours:minutes"),
        (700000.0, ["0", "1", "2", "3", "4", "5", "6", "7", "8"], "days"),
        (9e7, ["0", "119", "238", "357", "476", "595", "714", "833", "952"], "days"),
    ],
)
def test_the_time_axis_has_round_ticks(until_s: float, said: list[str], name: str) -> None:
    assert [figures.tick_label(at_s, until_s) for at_s in figures.ticks(until_s)] == said
    assert figures.axis_unit(until_s) == name


def test_text_is_escaped_and_elements_are_not() -> None:
    assert tag("p", "a < b", tag("b", "&"), class_='x"y', aria_label="z") == (
        '<p class="x&quot;y" aria-label="z">a &lt; b<b>&amp;</b></p>'
    )
    assert join("<", Html("<br>")) == "&lt;<br>"


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = [name for name in sys.modules if name.startswith(("matplotlib", "agent.observe.report"))]
    for name in gone:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.mark.usefixtures("without_matplotlib")
def test_the_missing_extra_is_named() -> None:
    """With one line, before anything is read or written."""
    with pytest.raises(ConfigError, match=r"pip install matplotlib"):
        report_job(None, None, None, as_json=False)
