"""One script three ways: without anything of ours, as a cold start that is recorded, and as a warm standby."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import venv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from standbys import RANK, Ended, Standby, run_cold, run_plain, run_warm

from trainer_runtime.agent_channel import boot_time
from trainer_runtime.standby import DEFAULT_MODULES, HOOK_DIR

_LIBRARY = {
    "tiny/__init__.py": "from tiny import late\nWHO = 'tiny'\n",
    "tiny/late.py": "import json\n\n\ndef fail():\n    raise ValueError('from a library')\n",
    "by_rank/__init__.py": "import os\n\nRANK = os.environ.get('RANK')\n",
    "by_listing.py": "import os\n\nALL = dict(os.environ)\n",
    "leads_to_rank.py": "import by_rank\n\nRANK = by_rank.RANK\n",
    "broken.py": "import tiny\nraise RuntimeError('broken here')\n",
    "ends_all.py": "raise SystemExit(5)\n",
    "by_mode.py": "import os\n\nMODE = os.environ.get('MODE', 'none')\n",
    "sets_one.py": "import os\n\nos.environ['SET_BY_LIBRARY'] = 'yes'\nos.environ.pop('TAKEN_AWAY', None)\n",
    "loud.py": "import sys\n\nprint('loaded')\nprint('really', file=sys.stderr)\n",
    "uses_neighbour.py": "import neighbour\n\nWHERE = neighbour.WHERE\n",
    "neighbour.py": "WHERE = 'library'\n",
    "torch/distributed/rendezvous.py": (
        "def _create_c10d_store(hostname, port, rank, world_size, timeout, use_libuv=True):\n    return rank\n"
    ),
    "runnable/__init__.py": "",
    "runnable/nn.py": "print('loaded')\n",
    "runnable/train.py": "from runnable import nn\nimport colorsys\nprint(__name__)\n",
    "runnable/leads.py": "from runnable import train\n",
    "probes.py": "import importlib.util\n\nFOUND = importlib.util.find_spec('neighbour') is not None\n",
}
_SHOW = """
    import json, os, re, subprocess, sys
    import tiny

    print(json.dumps({
        "argv": sys.argv, "path": sys.path, "flags": repr(sys.flags), "orig_argv": sys.orig_argv,
        "executable": sys.executable, "warnoptions": sys.warnoptions, "file": __file__,
        "spec": re.sub(" at 0x[0-9a-f]+", "", repr(__spec__)),
        "name": __name__, "package": __package__, "builtins": repr(__builtins__), "loader": type(__loader__).__name__,
        "names": sorted(globals()), "is_main": sys.modules["__main__"].__dict__ is globals(),
        "modules": sorted(sys.modules), "caches": sorted(path for path in sys.path_importer_cache if "standby" in path),
        "environ": sorted(os.environ.items()), "environb": sorted(map(repr, os.environb.items())),
        "handed_on": sorted(subprocess.run(["env"], capture_output=True, text=True).stdout.splitlines()),
        "own": type(os.environ._data).__name__, "cwd": os.getcwd(), "nice": os.nice(0),
        "descriptors": sorted(
            link for fd in range(99) for link in ["/proc/self/fd/%d" % fd]
            if os.path.exists(link) and "imports" not in os.readlink(link)
        ),
        "command": open("/proc/self/cmdline").read(),
    }, indent=1))
"""


@dataclass(frozen=True)
class Lab:
    """An interpreter with a few packages of its own, and a directory with scripts."""

    python: str
    site: Path
    home: Path
    started: list[Standby] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        """What a user's shell has."""
        return {"PATH": os.environ["PATH"], "HOME": str(self.home), "TAKEN_AWAY": "not yet"}

    def write(self, name: str, text: str) -> None:
        """Write a file of the user."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))

    def standby(self, *modules: str, command: tuple[str, ...] = ("train.py",), **told: list[str]) -> Standby:
        """Start one that imports these."""
        self.started.append(Standby([self.python, *command], self.env, self.home, modules=list(modules), **told))
        return self.started[-1]


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    directory = tmp_path_factory.mktemp("interpreter")
    venv.create(directory, symlinks=True)
    site = directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for name, text in _LIBRARY.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    return str(directory / "bin" / "python"), site


@pytest.fixture
def lab(interpreter: tuple[str, Path], tmp_path: Path) -> Iterator[Lab]:
    made = Lab(*interpreter, home=tmp_path)
    yield made
    for standby in made.started:
        standby.close()


def _same(lab: Lab, *command: str, modules: tuple[str, ...] = ("tiny",), **env: str) -> Ended:
    """Run it all three ways, and see no difference."""
    whole = [lab.python, *command]
    plain = run_plain(whole, lab.env | env, lab.home)
    for other in (
        run_cold(whole, lab.env | env, lab.home),
        run_warm(whole, lab.env | env, lab.home, modules=list(modules)),
    ):
        assert other.out.splitlines() == plain.out.splitlines()
        assert (other.err, other.code) == (plain.err, plain.code)
    return plain


@pytest.mark.parametrize(
    ("path", "command"),
    [
        (None, ("train.py", "--lr", "0.1")),
        ("", ("train.py",)),
        ("{home}/own", ("train.py",)),
        ("{home}/own::relative", ("train.py",)),
        (None, ("-u", "-O", "-W", "ignore", "-X", "dev", "./train.py", "-m")),
        (None, ("-m", "package", "x")),
        (None, ("-u", "-m", "package.part", "-c")),
        (None, ("inner",)),
        (None, ("{home}/link.py",)),
    ],
)
def test_a_script_finds_the_interpreter_as_in_any_other_start(
    lab: Lab, command: tuple[str, ...], path: str | None
) -> None:
    for name in ("train.py", "package/__init__.py", "package/__main__.py", "package/part.py", "inner/__main__.py"):
        lab.write(name, "" if name.endswith("__init__.py") else _SHOW)
    (lab.home / "elsewhere").mkdir()
    lab.write("elsewhere/real.py", _SHOW)
    (lab.home / "link.py").symlink_to("elsewhere/real.py")
    env = {} if path is None else {"PYTHONPATH": path.format(home=lab.home)}

    shown = _same(lab, *(word.format(home=lab.home) for word in command), **env)

    assert shown.code == 0, shown.err
    assert "RANK" in shown.out


def test_a_path_that_is_to_be_safe_is_safe(lab: Lab) -> None:
    """With PYTHONSAFEPATH the script's directory is not on the path, and its files are in nobody's way."""
    lab.write("neighbour.py", "WHERE = 'script'\n")
    lab.write("train.py", "import sys, uses_neighbour\nprint(sys.path, uses_neighbour.WHERE)\n")

    assert "library" in _same(lab, "train.py", modules=("uses_neighbour",), PYTHONSAFEPATH="1").out


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit('in words')", 1),
        ("raise KeyError('no')", 1),
        ("tiny.late.fail()", 1),
        ("import absent", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os._exit(7)", 7),
        ("no python", 1),
        ("threading.Thread(target=tiny.late.fail).start()", 0),
        ("warnings.warn('beware', DeprecationWarning)", 0),
    ],
)
def test_a_script_ends_as_in_any_other_start(lab: Lab, ends: str, code: int) -> None:
    """Exit code, signal, and every byte of a traceback; exit handlers in their order."""
    lab.write(
        "train.py",
        f"""
        import atexit, os, signal, sys, threading, warnings
        import tiny

        atexit.register(print, "first registered, last to run")
        atexit.register(print, "last registered, first to run")
        def train():
            {ends}
        train()
        """,
    )
    assert _same(lab, "train.py").code == code


def test_a_script_that_is_not_there_ends_as_in_any_other_start(lab: Lab) -> None:
    assert _same(lab, "train.py").code == 2
    assert _same(lab, "-m", "absent.part").code == 1


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_children_know_nothing_of_it(lab: Lab, method: str) -> None:
    """A child of the script meets no hook and is not recorded."""
    lab.write(
        "train.py",
        f"""
        import multiprocessing, os, sys

        def child(number):
            import neighbour
            finders = [str(finder) for finder in sys.meta_path]
            mine = [name for name in sys.modules if "elastic" in name or "standby" in name]
            return number, sorted(os.environ.items()), "sitecustomize" in sys.modules, mine, sys.path, finders

        if __name__ == "__main__":
            with multiprocessing.get_context("{method}").Pool(1) as pool:
                print(pool.map(child, [1, 2]))
            import tiny
        """,
    )
    assert "SUFFIX" not in _same(lab, "train.py").out
    assert "neighbour" not in run_cold([lab.python, "train.py"], lab.env, lab.home).imports.modules


def test_what_a_module_prints_while_it_is_imported_is_in_the_output(lab: Lab) -> None:
    lab.write("train.py", "import loud\nprint('begun')\n")
    assert _same(lab, "train.py", modules=("loud",)).out == "loaded\nbegun\n"


def test_a_module_beside_the_script_is_read_after_go(lab: Lab) -> None:
    """The script and its own modules may be edited while a standby that has learnt their names waits."""
    lab.write("helper.py", "TEXT = 'old'\n")
    lab.write("train.py", "import helper, tiny\nprint(helper.TEXT)\n")
    learnt = run_cold([lab.python, "train.py"], lab.env, lab.home)
    waiting = lab.standby(*learnt.imports.modules, "helper", elsewhere=list(learnt.imports.elsewhere))
    warm = waiting.receive()["warm"]
    lab.write("helper.py", "TEXT = 'newer'\n")
    lab.write("train.py", "import helper, tiny\nprint(helper.TEXT, 'too')\n")
    waiting.go()

    assert (learnt.out, waiting.end().out) == ("old\n", "newer too\n")
    assert list(warm["left_out"]) == ["helper"]
    assert learnt.imports.elsewhere == ("helper",)


def test_a_package_that_keeps_its_rank_behaves_as_in_a_cold_start(lab: Lab) -> None:
    """Who reads the rank while being imported is told, with all that led there; without them it goes well."""
    lab.write("train.py", "import tiny, leads_to_rank\nprint(leads_to_rank.RANK)\nimport loud\n")
    learnt = run_cold([lab.python, "train.py"], lab.env, lab.home)
    assert {"tiny", "tiny.late", "by_rank", "leads_to_rank"} <= {*learnt.imports.modules}

    tainted = lab.standby(*learnt.imports.modules)
    named = tainted.receive_tainted()
    ended = tainted.end()
    assert named == ["by_rank", "leads_to_rank"]
    assert (ended.code, ended.out) == (0, "")
    rest = tuple(name for name in learnt.imports.modules if name not in named)

    assert _same(lab, "train.py", modules=rest).out == f"{RANK['RANK']}\nloaded\n"


def test_a_module_that_lists_the_environment_has_read_it(lab: Lab) -> None:
    """But for code that is known to keep nothing of it."""
    lab.write("train.py", "")
    waiting = lab.standby("uuid", "ctypes.util", "by_listing")
    assert waiting.receive_tainted() == ["by_listing"]


@pytest.mark.parametrize(("name", "reason"), [("broken", "RuntimeError: broken here"), ("ends_all", "SystemExit: 5")])
def test_a_module_that_breaks_is_left_out(lab: Lab, name: str, reason: str) -> None:
    lab.write("train.py", f"import tiny\nprint('begun')\nimport {name}\n")
    waiting = lab.standby(name, "tiny", "no_such_module")
    left_out = waiting.receive()["warm"]["left_out"]
    waiting.go()

    assert left_out == {name: reason, "no_such_module": "ModuleNotFoundError: No module named 'no_such_module'"}
    assert waiting.end() == run_plain([lab.python, "train.py"], lab.env, lab.home)


@pytest.mark.parametrize("text", ["import os, sys\nsys.seen = os.environ['RANK']\n", "raise KeyError('mine')\n", None])
def test_the_users_own_sitecustomize_runs(lab: Lab, text: str | None) -> None:
    """Also one that fails; and where there is none but the interpreter's, if it has one, that is it."""
    if text is not None:
        lab.write("own/sitecustomize.py", text)
    lab.write(
        "train.py",
        """
        import sys
        print(getattr(sys, "seen", None), getattr(sys.modules.get("sitecustomize"), "__file__", None))
        import sitecustomize
        """,
    )
    shown = _same(lab, "train.py", PYTHONPATH=str(lab.home / "own"))
    assert str(HOOK_DIR) not in shown.out
    assert text is None or "No module named 'sitecustomize'" not in shown.err


def test_a_name_that_the_script_has_itself_is_not_imported_ahead(lab: Lab) -> None:
    """Neither by its name, nor in consequence of another's import; the names that led there are told."""
    lab.write("neighbour.py", "WHERE = 'script'\n")
    lab.write("train.py", "import uses_neighbour\nprint(uses_neighbour.WHERE)\n")
    waiting = lab.standby("uses_neighbour")
    assert waiting.receive_tainted() == ["uses_neighbour"]
    waiting = lab.standby("neighbour")
    assert "neighbour" in waiting.receive()["warm"]["left_out"]
    waiting.go()
    assert waiting.end().out == "script\n"


def test_an_installed_package_that_is_run_by_its_name_is_imported_ahead(lab: Lab) -> None:
    """All of it but what runs, which is read after "go", and what leads there."""
    run = ("-m", "runnable.train")
    learnt = run_cold([lab.python, *run], lab.env, lab.home).imports
    assert {"runnable", "runnable.nn"} <= {*learnt.modules}
    waiting = lab.standby(*learnt.modules, command=run)
    assert waiting.receive()["warm"]["left_out"] == {}
    waiting.go()
    assert waiting.end() == run_plain([lab.python, *run], lab.env, lab.home)
    assert lab.standby("runnable.nn", "runnable.leads", command=run).receive_tainted() == ["runnable.leads"]


def test_a_name_that_comes_to_be_shadowed_begins_anew(lab: Lab) -> None:
    """What was imported ahead is another module than the script would get now: it starts as a cold one."""
    lab.write("train.py", "import uses_neighbour, sys\nprint(uses_neighbour.WHERE, sys.argv, sys.path)\n")
    waiting = lab.standby("uses_neighbour", command=("train.py", "x"))
    assert "warm" in waiting.receive()
    lab.write("neighbour.py", "WHERE = 'script'\n")
    waiting.go()

    assert waiting.end() == run_plain([lab.python, "train.py", "x"], lab.env, lab.home)


def test_a_package_from_a_path_of_the_scripts_own_is_not_imported_ahead(lab: Lab) -> None:
    """A fork that the script puts first on its path is what libraries import, too."""
    lab.write("fork/neighbour.py", "WHERE = 'fork'\n")
    lab.write("train.py", "import sys\nsys.path.insert(0, 'fork')\nimport uses_neighbour, tiny\n")
    learnt = run_cold([lab.python, "train.py"], lab.env, lab.home).imports
    assert (learnt.elsewhere, "uses_neighbour" in learnt.modules) == (("neighbour",), True)

    waiting = lab.standby(*learnt.modules, elsewhere=list(learnt.elsewhere))
    assert waiting.receive_tainted() == ["uses_neighbour"]


def test_a_variable_that_the_script_sets_before_an_import_counts(lab: Lab) -> None:
    """It is in the record of the last start, or to be seen in the script before there was any."""
    lab.write("train.py", "import os\nos.environ['MODE'] = 'mine'\nimport by_mode, tiny\nprint(by_mode.MODE)\n")
    learnt = run_cold([lab.python, "train.py"], lab.env, lab.home)
    assert (learnt.out, learnt.imports.variables) == ("mine\n", ("MODE",))

    lab.write("other.py", "")
    by_text = lab.standby(*learnt.imports.modules)
    by_record = lab.standby(*learnt.imports.modules, command=("other.py",), variables=list(learnt.imports.variables))
    by_neither = lab.standby(*learnt.imports.modules, command=("other.py",))
    assert by_text.receive_tainted() == by_record.receive_tainted() == ["by_mode"]
    assert "warm" in by_neither.receive()


def test_what_a_module_does_to_the_environment_stays(lab: Lab) -> None:
    """It is not imported again, so nobody would do it. What it changes itself is no reason against it."""
    lab.write("train.py", "import sets_one, os, subprocess\nprint(sorted(os.environ))\nsubprocess.run(['env'])\n")
    learnt = run_cold([lab.python, "train.py"], lab.env, lab.home).imports
    waiting = lab.standby("sets_one", variables=["SET_BY_LIBRARY", "TAKEN_AWAY"])
    waiting.receive()
    waiting.go()
    ended = waiting.end()

    assert "sets_one" not in learnt.variables
    assert "'SET_BY_LIBRARY'" in ended.out
    assert "SET_BY_LIBRARY=yes" in ended.out
    assert "TAKEN_AWAY" not in ended.out


def test_only_what_was_loaded_is_recorded(lab: Lab) -> None:
    """A module that was merely looked for, or that failed, is not."""
    lab.write("train.py", "import probes, tiny\ntry:\n    import broken\nexcept RuntimeError:\n    pass\nimport loud\n")
    recorded = run_cold([lab.python, "train.py"], lab.env, lab.home).imports
    assert {"probes", "tiny", "tiny.late", "json"} <= {*recorded.modules}
    assert not {"neighbour", "broken", "__main__"} & {*recorded.modules}


def test_a_standby_whose_agent_is_gone_ends_without_its_script(lab: Lab) -> None:
    lab.write("train.py", "print('begun')\n")
    waiting = lab.standby("tiny")
    waiting.receive()
    waiting.leave()
    ended = waiting.end()
    assert (ended.code, ended.out, ended.err) == (0, "", "")


def test_an_error_in_the_hook_never_runs_the_script_of_a_standby(lab: Lab) -> None:
    lab.write("train.py", "print('begun')\n")
    waiting = lab.standby("tiny")
    waiting.receive()
    waiting.spoil()
    ended = waiting.end()
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("elastic-agent: a warm worker ends: JSONDecodeError")
    assert ended.err.count("\n") == 1


def test_an_error_in_the_hook_does_not_keep_a_cold_start_from_its_script(lab: Lab) -> None:
    lab.write("train.py", "print('begun')\n")
    told = {"PYTHONPATH": str(Path(__file__).parents[2] / "trainer_runtime/standby"), "ELASTIC_AGENT_IMPORTS_FD": "999"}
    ended = run_plain([lab.python, "train.py"], lab.env | told, lab.home)
    assert (ended.code, ended.out) == (0, "begun\n")
    assert ended.err.startswith("elastic-agent: what this worker imports is not recorded: OSError")


def test_what_opens_the_store_looks_like_torchs_own(lab: Lab) -> None:
    """It is another function, which knocks first: the module, its loader and the function's face are as they were."""
    lab.write(
        "train.py",
        """
        import inspect, pickle
        from torch.distributed import rendezvous

        create = rendezvous._create_c10d_store
        print(create(hostname="h", port=1, rank=0, world_size=2, timeout=None), inspect.signature(create))
        print(type(create), create.__name__, create.__qualname__, create.__module__, inspect.getsource(create))
        print(pickle.loads(pickle.dumps(create)) is create, sorted(vars(rendezvous)), rendezvous.__spec__.origin)
        print(rendezvous.__loader__ is rendezvous.__spec__.loader, vars(rendezvous.__loader__))
        """,
    )
    assert _same(lab, "train.py", modules=("torch.distributed.rendezvous",)).code == 0


def test_the_installed_torch_waits_for_the_master(tmp_path: Path) -> None:
    """Whether it was imported ahead or by the script."""
    (tmp_path / "train.py").write_text(
        "import inspect\nfrom torch.distributed.rendezvous import _create_c10d_store as create\n"
        "print(inspect.unwrap(create) is not create)\n"
    )
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    command = [sys.executable, "train.py"]
    cold = run_cold(command, env, tmp_path)
    warm = run_warm(command, env, tmp_path, modules=["torch.distributed"])

    assert (cold.out, cold.err) == (warm.out, warm.err) == ("True\n", "")


@pytest.mark.long("test_standby_agent.py: a killed worker is replaced by its standby")
def test_torch_that_was_imported_ahead_trains_alike(tmp_path: Path) -> None:
    """With what comes late: optimizer, DDP, gloo, workers of a loader. The way to the first step begins at "go"."""
    (tmp_path / "train.py").write_text(
        textwrap.dedent(
            """
import os, sys
told_at = float(os.environ.pop("TOLD_AT", "inf"))
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from trainer_runtime.agent_channel import milestones

def where(_):
    sys.stderr.write(f"{'sitecustomize' in sys.modules} {os.environ['RANK']} {sys.path[0]}\\n")

def main():
    torch.manual_seed(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    opt = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.arange(24.0).reshape(8, 3))
    for context in ("fork", "spawn"):
        for (batch,) in DataLoader(
            data, 4, num_workers=1, worker_init_fn=where, multiprocessing_context=context
        ):
            model(batch).square().sum().backward()
            opt.step()
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch's note to itself, when it was first needed
    print(model.module.weight.tolist(), torch.get_num_threads(), sorted(os.environ))
    print(milestones.entered >= told_at)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""
        )
    )
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    plain = run_plain([sys.executable, "train.py"], env | {"TOLD_AT": repr(boot_time())}, tmp_path)
    waiting = Standby(
        [sys.executable, "train.py"], env, tmp_path, modules=["trainer_runtime.agent_channel", *DEFAULT_MODULES]
    )
    try:
        assert "warm" in waiting.receive()
        waiting.go(TOLD_AT=repr(boot_time()))
        warm = waiting.end()
    finally:
        waiting.close()

    assert plain.code == 0, plain.err
    assert "True" in plain.out.splitlines()
    assert (warm.out, warm.err, warm.code) == (plain.out, plain.err, plain.code)
