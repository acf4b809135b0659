"""The pages in docs/reference say what the code says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from agent.cli.command_line import COMMANDS, run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("reference_pages")


def test_the_committed_pages_are_those_that_the_script_makes(reference: ModuleType) -> None:
    wrong = reference.differing()
    assert not wrong, (
        f"docs/reference differs from the code in {', '.join(wrong)}: run scripts/reference, and commit it"
    )


def test_a_page_that_differs_is_missing_or_is_superfluous_is_found(reference: ModuleType, tmp_path: Path) -> None:
    made = reference.pages()
    for name, text in made.items():
        (tmp_path / name).write_text(text)
    assert reference.differing(tmp_path) == []
    (tmp_path / "options.md").write_text(made["options.md"].replace("--job_id", "--job"))
    (tmp_path / "metrics.md").unlink()
    (tmp_path / "other.md").write_text("by hand")
    assert reference.differing(tmp_path) == ["metrics.md", "options.md", "other.md"]


def test_all_options_and_commands_are_there(reference: ModuleType) -> None:
    page = reference.pages()["options.md"]
    for parameter in run.params:
        if not getattr(parameter, "hidden", True) and parameter.name != "version":
            assert re.search(rf"^\| `[^`]*--{parameter.name}\b", page, re.MULTILINE), parameter.name
    for name in COMMANDS.keys() - {"run"}:
        assert f"### `elastic-agent {name}" in page


def test_every_variable_has_a_description(reference: ModuleType) -> None:
    """Where there is none, add a docstring to the constant, or a line to scripts/reference_pages/environment.py."""
    page = reference.pages()["environment.md"]
    assert not re.findall(r"^\| (`\w+`) \| — \|", page, re.MULTILINE)


def test_links_between_the_pages_lead_somewhere(reference: ModuleType) -> None:
    made = reference.pages()
    for name, text in made.items():
        for page, anchor in re.findall(r"\]\(([\w.-]*)#?([\w-]*)\)", text):
            target = made[page or name]
            headings = [line.lstrip("# ") for line in target.splitlines() if line.startswith("#")]
            anchors = {re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) for heading in headings}
            assert not anchor or anchor in anchors, (name, page, anchor)


def test_every_key_has_a_record_on_the_page_of_records(reference: ModuleType) -> None:
    made = reference.pages()
    rows = [line for line in made["etcd-keys.md"].splitlines() if line.startswith("| `")]
    assert len(rows) > 10
    for row in rows:
        assert "](records.md#" in row, row
        assert " — " not in row, row
