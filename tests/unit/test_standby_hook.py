"""What the agent uses of the standbys' package, and the parts that can be looked at in one process."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer_runtime import contract, standby
from trainer_runtime.standby import HOOK_DIR, Imports, library_paths, read_imports, sitecustomize, with_hook
from trainer_runtime.standby.environment_watch import EnvironmentWatch, variables_set_in
from trainer_runtime.standby.import_recorder import ImportRecorder
from trainer_runtime.standby.preloading import Preloader
from trainer_runtime.standby.priority import low_priority


def test_the_hook_knows_the_names_of_the_contract() -> None:
    """It cannot import them."""
    assert sitecustomize._STANDBY_FD == contract.STANDBY_FD
    assert sitecustomize._STANDBY_ORDER_FD == contract.STANDBY_ORDER_FD
    assert sitecustomize._STANDBY_PYTHONPATH == contract.STANDBY_PYTHONPATH
    assert sitecustomize._IMPORTS_FD == contract.IMPORTS_FD


@pytest.mark.parametrize(
    ("own", "path"),
    [
        ({}, f"{HOOK_DIR}"),
        ({"PYTHONPATH": ""}, f"{HOOK_DIR}"),  # an empty entry would be the working directory
        ({"PYTHONPATH": "/a:/b"}, f"{HOOK_DIR}:/a:/b"),
        ({"PYTHONPATH": ":"}, f"{HOOK_DIR}::"),
    ],
)
def test_the_hook_comes_first_on_the_path(own: dict[str, str], path: str) -> None:
    made = with_hook({"A": "1", contract.STANDBY_PYTHONPATH: "of an agent that started this one", **own})
    told = {contract.STANDBY_PYTHONPATH: own["PYTHONPATH"]} if own else {}
    assert made == {"A": "1", "PYTHONPATH": path, **told}


def test_a_place_that_no_path_can_name_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert standby.can_hook()
    monkeypatch.setattr(standby, "HOOK_DIR", tmp_path)
    assert not standby.can_hook()
    (tmp_path / "a:b").mkdir()
    (tmp_path / "a:b/sitecustomize.py").touch()
    monkeypatch.setattr(standby, "HOOK_DIR", tmp_path / "a:b")
    assert not standby.can_hook()


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("imports")
    os.ftruncate(fd, 256)
    yield fd
    os.close(fd)


def test_what_is_recorded_is_read(memory: int) -> None:
    recorder = ImportRecorder(mmap.mmap(memory, 0))
    for line in ("torch.nn", "!mine", "$MODE"):
        recorder._write(line)
    assert read_imports(memory) == Imports(("torch.nn",), ("mine",), ("MODE",))


def test_a_record_that_is_full_stays_whole(memory: int) -> None:
    recorder = ImportRecorder(mmap.mmap(memory, 0))
    for number in range(100):
        recorder._write(f"module_{number}")
    modules = read_imports(memory).modules
    assert 10 < len(modules) < 256 / 9
    assert modules == tuple(f"module_{number}" for number in range(len(modules)))


def test_a_name_is_recorded_when_its_import_is_over(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while it lasts, and not if nothing came of it."""
    recorder = ImportRecorder(mmap.mmap(memory, 0))
    recorder._environ = dict(os.environ._data)  # type: ignore[attr-defined]
    importing = type(sys)("importing")
    importing.__spec__ = type("Spec", (), {"_initializing": True, "has_location": False})()  # type: ignore[assignment]
    importing.__spec__.submodule_search_locations = None  # type: ignore[union-attr]
    monkeypatch.setitem(sys.modules, "importing", importing)
    for name in ("importing", "no_such_module", "json", "no_such_module"):
        recorder.find_spec(name)
    assert read_imports(memory).modules == ("json",)
    importing.__spec__._initializing = False  # type: ignore[union-attr]
    recorder.find_spec("another")
    assert read_imports(memory).modules == ("json", "importing")


def test_an_import_within_an_import_of_the_same_thread_is_not_waited_for(memory: int) -> None:
    """A signal's handler may run in the middle of the recorder."""
    recorder = ImportRecorder(mmap.mmap(memory, 0))
    with recorder._lock:
        recorder.find_spec("json")
    assert recorder._asked == []


def test_a_recorder_that_fails_ends_and_fails_no_import(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = ImportRecorder(mmap.mmap(memory, 0))
    monkeypatch.setattr(sys, "meta_path", [recorder, *sys.meta_path])
    recorder._asked = ["json"]
    monkeypatch.setattr(recorder, "_note", None)
    recorder.find_spec("another")
    assert recorder not in sys.meta_path


@pytest.mark.parametrize(
    ("script", "path", "is_library"),
    [
        ("/home/me/train.py", "/venv/lib/site-packages/torch/__init__.py", True),
        ("/home/me/train.py", "/home/me/helper.py", False),
        ("/home/me/train.py", "/home/you/editable/__init__.py", False),
        ("/venv/train.py", "/venv/lib/site-packages/torch/__init__.py", True),
        ("/venv/train.py", "/venv/helper.py", False),
        ("/venv/lib/site-packages/mine/train.py", "/venv/lib/site-packages/mine/helper.py", False),
        ("/venv/lib/site-packages/mine/train.py", "/venv/lib/site-packages/torch/__init__.py", True),
    ],
)
def test_a_library_is_what_was_installed_and_is_not_the_scripts_neighbour(
    monkeypatch: pytest.MonkeyPatch, script: str, path: str, *, is_library: bool
) -> None:
    monkeypatch.setattr(library_paths, "library_dirs", lambda: ("/venv/lib/", "/venv/lib/site-packages/"))
    monkeypatch.setattr(sys, "argv", [script])
    assert library_paths.LibraryPaths().is_library(path) == is_library


def test_a_script_that_sets_a_variable_is_seen_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a default, where there is no value yet; but not one that merely asks."""
    script = tmp_path / "train.py"
    script.write_text(
        'os.environ["A"] = "1"\nenviron [ "B" ] = 2\nif os.environ["C"] == "x": pass\nos.environ[ \'D\']=d\n'
        'os.environ.setdefault("E", "1")\nos.environ.setdefault("F", "1")\nmyenviron["G"] = 1\n'
    )
    monkeypatch.setenv("F", "there")
    assert variables_set_in(str(script)) == {"A", "D", "E"}
    assert variables_set_in(str(tmp_path)) == set()


def test_low_priority_ends_for_all_threads() -> None:
    """Those that were begun meanwhile have inherited it."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    is_over = threading.Event()
    with low_priority():
        within = os.getpriority(os.PRIO_PROCESS, 0)
        thread = threading.Thread(target=is_over.wait)
        thread.start()
    assert thread.native_id is not None
    try:
        assert os.getpriority(os.PRIO_PROCESS, thread.native_id) == os.getpriority(os.PRIO_PROCESS, 0) == before
        assert within in {before, max(before, 10)}
    finally:
        is_over.set()
        thread.join()


_CONTENTS = {b"RANK": b"1", b"HOME": b"/root"}


@pytest.fixture
def contents(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    """An environment of the test's own."""
    own = dict(_CONTENTS)
    monkeypatch.setattr(os.environ, "_data", own)
    monkeypatch.setattr(os.environb, "_data", own)
    return own


@pytest.mark.parametrize(
    ("code", "is_seen"),
    [
        ("os.environ['RANK']", True),
        ("os.environ.get('RANK')", True),
        ("os.getenv('RANK', '0')", True),
        ("os.environb.get(b'RANK')", True),
        ("'RANK' in os.environ", True),
        ("os.environ.setdefault('RANK', '0')", True),
        ("os.environ.pop('RANK')", True),
        ("dict(os.environ)", True),
        ("os.environ.copy()", True),
        ("[*os.environ.items()]", True),
        ("{**os.environ}", True),
        ("repr(os.environ)", True),
        ("os.environ['HOME']", False),
        ("os.environ.get('RANKS')", False),
        ("os.environ.update(A='1')", False),
        ("len(os.environ)", False),
    ],
)
def test_a_read_of_a_watched_variable_is_seen(contents: dict[bytes, bytes], code: str, *, is_seen: bool) -> None:
    """However it is read; the module that does it is named."""
    seen: list[list[str]] = []
    with EnvironmentWatch({"RANK"}, set(), seen.append):
        exec(compile(code, "module.py", "exec"), {"os": os, "__name__": "a.module"})  # noqa: S102
    assert bool(seen) == is_seen
    assert all(names[0] == "a.module" for names in seen)
    assert os.environ._data is contents  # type: ignore[attr-defined]


def test_changes_that_modules_made_to_the_environment_are_reported_and_stay(
    contents: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "putenv", lambda *_: None)
    monkeypatch.setattr(os, "unsetenv", lambda *_: None)
    contents.pop(b"PYTEST_CURRENT_TEST", None)
    watch = EnvironmentWatch({"RANK"}, set(), lambda _: None)
    with watch:
        os.environ["NEW"] = "1"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = "chosen"
        del os.environ["HOME"]
        changes = watch.changes()
    assert changes == {b"NEW": b"1", b"HOME": None, b"TORCHINDUCTOR_CACHE_DIR": None}  # torch's own note to itself
    assert contents == {b"RANK": b"1", b"NEW": b"1", b"TORCHINDUCTOR_CACHE_DIR": b"chosen"}


@pytest.mark.parametrize(
    ("by_script", "code", "blamed"),
    [
        ("MODE", "os.environ.get('MODE')", ["a.module"]),
        ("MODE", "os.environ.setdefault('MODE', 'mine')", []),
        ("MODE", "", []),
        ("OMP_NUM_THREADS", "", ["numpy", "torch"]),
        ("TORCH_DISTRIBUTED_DEBUG", "", ["numpy", "torch"]),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "", []),
        ("KMP_INIT_AT_FORK", "os.environ['KMP_INIT_AT_FORK'] = 'FALSE'", []),
    ],
)
def test_what_the_script_sets_first_must_not_have_been_read(
    contents: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch, by_script: str, code: str, blamed: list[str]
) -> None:
    """Nor by C code of packages that are known to; what a module sets itself is its own business."""
    monkeypatch.setattr(os, "putenv", lambda *_: None)
    for package in ("numpy", "torch"):
        monkeypatch.setitem(sys.modules, package, type(sys)(package))
    seen: list[str] = []
    watch = EnvironmentWatch(set(), {by_script}, seen.extend)
    with watch:
        exec(compile(code, "module.py", "exec"), {"os": os, "__name__": "a.module"})  # noqa: S102
        seen.extend(watch.judge())
    assert [name for name in seen if name in {"a.module", "numpy", "torch"}] == blamed
    assert by_script.encode() not in contents or contents[by_script.encode()] in {b"mine", b"FALSE"}


class _Libraries(library_paths.LibraryPaths):
    """All that is in one directory."""

    def __init__(self, directory: Path) -> None:
        self._libraries = (f"{directory}/",)
        self._script_dir = "/the script's/"
        self._before = []
        self.module = self.script = ""


@pytest.fixture
def preload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Preloader]]:
    """Import modules ahead, in this process, that were written to a directory."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def run(files: dict[str, str], names: Sequence[str], **order: list[str]) -> Preloader:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        preloader = Preloader(_Libraries(tmp_path), {"watched": ["RANK"], **order}, lambda _: None)
        preloader.run(names)
        return preloader

    yield run
    for name in set(sys.modules) - before:
        del sys.modules[name]


def _of_tests(names: Iterable[str]) -> set[str]:
    """Without modules of pytest and its workers, which hold `os.environ` or `sys` as well."""
    return {name for name in names if not name.startswith("__")}


_LISTS = {
    "lists/__init__.py": "from lists import config\n",
    "lists/config.py": "import os\nALL = dict(os.environ)\n",
    **{f"lists/part_{number}.py": "" for number in range(9)},
    "first.py": "import lists.part_3\n",
    "second.py": "import json\ntry:\n    from lists import part_4\nexcept Exception:\n    pass\n",
    "third.py": "import second\n",
    "plain.py": "import json\n",
}
_LEARNT = [
    "lists.config",
    *(f"lists.part_{number}" for number in range(9)),
    "lists",
    "first",
    "second",
    "third",
    "plain",
]


def test_all_that_leads_to_a_package_which_may_not_be_imported_is_found_in_one_try(
    preload: Callable[..., Preloader],
) -> None:
    preloader = preload(_LISTS, _LEARNT)
    assert _of_tests(preloader.tainted) == {"lists", "lists.config", "first", "second", "third"}
    assert "plain" in sys.modules


def test_what_another_standby_has_met_is_not_imported_again(preload: Callable[..., Preloader]) -> None:
    """What leads there is found, too, where it was only seen at the end that it may not be."""
    preloader = preload(_LISTS, ["first", "third", "plain"], avoided=["lists"])
    assert _of_tests(preloader.tainted) == {"first", "second", "third"}
    assert "lists.config" not in sys.modules


def test_a_module_that_uses_cuda_is_found_and_those_after_it_are_not_blamed(
    preload: Callable[..., Preloader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby that holds memory on a GPU must not stay. CUDA is faked: this needs no GPU."""
    cuda = SimpleNamespace(is_begun=False, is_initialized=lambda: cuda.is_begun)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    files = {"before.py": "", "kernels.py": "import torch\ntorch.cuda.is_begun = True\n", "after.py": ""}
    preloader = preload(files, ["before", "kernels", "after"])
    assert _of_tests(preloader.tainted) == {"kernels"}
    assert "after" in sys.modules


def test_a_package_that_cannot_be_imported_is_reported_as_a_whole(preload: Callable[..., Preloader]) -> None:
    """And so is one that the script has from elsewhere. Of one that can, the module."""
    files = {"broken/__init__.py": "raise OSError('no driver')\n", "broken/a.py": "", "whole/__init__.py": ""}
    names = ["broken.a", "broken.b", "broken", "mine.a", "mine.b", "whole.missing", "whole"]
    preloader = preload(files, names, elsewhere=["mine"])
    assert preloader.left_out == {
        "broken": "OSError: no driver",
        "mine": "it is the script's own, or not from the interpreter's libraries",
        "whole.missing": "ModuleNotFoundError: No module named 'whole.missing'",
    }
    assert not preloader.tainted
