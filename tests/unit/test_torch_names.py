"""The list of torch's private names is complete, and a missing one is reported in one line."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agent.doctor import local_checks
from trainer_runtime.torch_names import NAMES, TESTED, TorchName, describe_missing

ROOT = Path(__file__).resolve().parents[2]
NOT_TORCHS = {
    *("_exit", "_getframe", "_map", "_asdict", "_ncallbacks", "_run_exitfuncs"),  # of the standard library
    "_is_gradient_accumulation_boundary",  # DeepSpeed's
    *("_restored", "_keys", "_values"),  # trainer_runtime's own
}
MISSING = "torch._foreach_copy_: no snapshots"


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a module takes from other packages, or from objects other than its own."""
    tree.body = [each for each in tree.body if ast.unparse(each).partition("\n")[0] != "if TYPE_CHECKING:"]
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("torch"):
                yield from (each.name for each in names if each.name.startswith("_") or "._" in module)
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if name.startswith("_") and not name.endswith("__"):
                yield name


def test_every_private_name_of_torch_is_listed() -> None:
    """A name that is only a string, for `getattr` or in a pickle, is not seen here."""
    listed = {each.path.rpartition(".")[2] for each in NAMES}
    for path in sorted((ROOT / "trainer_runtime").rglob("*.py")):
        if {"integrations", "standby"}.isdisjoint(path.parts):  # names of frameworks; modules without torch
            unlisted = {*private_names(ast.parse(path.read_text(encoding="utf-8")))} - listed - NOT_TORCHS
            assert not unlisted, f"{path.name}: add {unlisted} to trainer_runtime/torch_names.py"


def test_the_installed_torch_has_every_name() -> None:
    assert describe_missing(is_import_allowed=True) == ""


def test_the_pinned_torch_is_one_of_the_tested() -> None:
    (pin,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    assert pin.removeprefix("torch==") in TESTED, "if all else passes with it, add it to TESTED and to docs/testing.md"


@pytest.mark.parametrize("name", NAMES, ids=lambda each: each.path)
def test_a_name_that_is_not_there_is_noticed(name: TorchName) -> None:
    assert not name._replace(path=f"{name.path}_of_another_torch").is_in(sys.modules["torch"])
    describe_missing(is_import_allowed=True)
    assert not name._replace(path=f"{name.path}_of_another_torch").is_in(sys.modules[name.module])


def test_one_line_names_what_is_missing_and_what_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_foreach_copy_")
    assert describe_missing() == (
        f"torch {torch.__version__} lacks what trainer_runtime needs ({MISSING}); install torch {' or '.join(TESTED)}"
    )


def test_init_prints_the_line_and_goes_on() -> None:
    script = "import torch; del torch._foreach_copy_; import trainer_runtime as tr; tr.init(); print(tr.world_size())"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=300)
    assert done.stdout == "1\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("trainer_runtime: torch ")
    assert MISSING in line


def test_the_doctor_prints_the_line(tmp_path: Path) -> None:
    """Each process with the hook in its path has a torch that lacks a name, or cannot be imported."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    hook = tmp_path / "sitecustomize.py"
    hook.write_text("import torch\ndel torch._foreach_copy_\n")
    found = local_checks.torch_names(environ)
    assert MISSING in found.line
    assert found.do == f"pip install torch=={TESTED[-1]}"
    hook.write_text("import sys\nsys.modules['torch'] = None\n")
    found = local_checks.torch_names(environ)
    assert found.line.startswith("WRONG  torch: torch cannot be imported: ")
