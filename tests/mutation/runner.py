"""Play mutants against the suite, each in a process of its own.

This process imports all that the checks need. A fork of it forgets the project's modules, imports them anew with one
of them changed, and plays the checks that reach the change until one fails. A mutant is *killed* by a check that
raises anything, or that takes far longer than it should; it *survives* if all of them pass.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import coverage
from mutation import suite
from mutation.mutants import Mutant

_OWN = tuple(str(suite.ROOT / name) + os.sep for name in ("agent", "trainer_runtime", "tests"))
_NOT_ANEW = str(Path(__file__).parent) + os.sep
_LEAST_S = 5.0
_TIMES_AS_LONG = 20
"""A check that takes so many times the processor time that it should, and a few seconds, does not end."""
_BLOCKED_S = 120
_LONGEST_S = 5.0
"""A check that takes longer is not played: all the others together take a few times as long."""
TIMED_OUT = "a check did not end"


@dataclass(frozen=True)
class Reach:
    """What the checks run of the project as it is, and how long each takes."""

    seconds: dict[str, float]
    lines: dict[str, dict[int, list[str]]]
    """The checks that run a line, by module."""

    def checks(self, mutant: Mutant, kills: Mapping[str, int]) -> list[str]:
        """The checks that reach a mutant, in the order in which they are likely to kill it soon.

        Short ones come first, and those that have killed many others; those that play with chance come last.
        """
        lines = self.lines.get(mutant.module, {})
        if mutant.span is None:  # it matters wherever the module is used, and perhaps elsewhere
            near = {check for found in lines.values() for check in found}
            reached = set(self.seconds)
        else:
            first, last = mutant.span
            near = reached = {check for line in range(first, last + 1) for check in lines.get(line, ())}

        def order(check: str) -> tuple[bool, bool, float, str]:
            return suite.is_random(check), check not in near, self.seconds[check] / (1 + kills.get(check, 0)), check

        return sorted((each for each in reached if self.seconds[each] < _LONGEST_S), key=order)


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant."""

    mutant: Mutant
    killed_by: str
    """A check, or why it did not end. Empty: it survived."""
    seconds: float
    checks: int
    """So many reach it."""


def path_of(module: str) -> Path:
    """Where a module's source is."""
    return (suite.ROOT / module.replace(".", "/")).with_suffix(".py")


def measure(modules: Sequence[str], checks: Sequence[str]) -> Reach:
    """Play all checks once on the modules as they are. Raises `RuntimeError` if one fails."""
    warm_up()
    ((_, said),) = _in_forks([(None, lambda: _measured(modules, checks))], jobs=1)
    if said is None or isinstance(said, str):
        raise RuntimeError(f"the suite fails on the code as it is: {said}")
    lines = {name: {int(line): found for line, found in of.items()} for name, of in said["lines"].items()}
    numbered = {
        name: {line: [checks[number] for number in found] for line, found in of.items()} for name, of in lines.items()
    }
    return Reach(said["seconds"], numbered)


def _measured(modules: Sequence[str], checks: Sequence[str]) -> object:
    forget()  # as for a mutant: a check that fails only for this would seem to kill them all
    files = {name: str(path_of(name)) for name in modules}
    measuring = coverage.Coverage(data_file=None, config_file=False, include=list(files.values()), messages=False)
    seconds = {}
    measuring.start()
    for number, check in enumerate(checks):
        measuring.switch_context(str(number))
        began = time.process_time()
        try:
            suite.play(check)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is reported
            return f"{check}: {error!r}"
        seconds[check] = time.process_time() - began
    measuring.stop()
    data = measuring.get_data()
    lines = {
        name: {line: [int(each) for each in found if each] for line, found in data.contexts_by_lineno(file).items()}
        for name, file in files.items()
    }
    return {"seconds": seconds, "lines": lines}


def run(mutants: Iterable[Mutant], reach: Reach, *, jobs: int) -> Iterator[Outcome]:
    """Play each mutant; outcomes come as they are found."""
    warm_up()
    kills: Counter[str] = Counter()

    def asked() -> Iterator[tuple[Mutant, Callable[[], object]]]:
        for mutant in mutants:
            yield mutant, lambda mutant=mutant: _outcome(mutant, reach.checks(mutant, kills), reach.seconds)

    for mutant, said in _in_forks(asked(), jobs=jobs):
        killed_by, seconds, count = said if isinstance(said, list) else (TIMED_OUT, 0.0, 0)
        kills[killed_by] += 1
        yield Outcome(mutant, killed_by, seconds, count)


def _outcome(mutant: Mutant, checks: list[str], seconds: dict[str, float]) -> object:
    began = time.process_time()
    tree = mutant.apply(path_of(mutant.module).read_text(encoding="utf-8"))
    return [killer(mutant.module, tree, checks, seconds), time.process_time() - began, len(checks)]


def killer(module: str, tree: ast.Module, checks: Sequence[str], seconds: dict[str, float]) -> str:
    """Change a module in this process, for good; return the first check that fails, or an empty string."""
    forget()
    sys.meta_path.insert(0, _Finder(module, compile(tree, str(path_of(module)), "exec", dont_inherit=True)))
    for check in checks:
        limit_s = _LEAST_S + _TIMES_AS_LONG * seconds.get(check, 1.0)
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # either one ends the process
        signal.alarm(_BLOCKED_S)
        try:
            suite.play(check)
        except BaseException:  # noqa: BLE001 - whatever it is, it was noticed
            return check
    return ""


def forget() -> None:
    """Forget all modules of the project, so that they are imported anew: none may hold on to another's old classes."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(_OWN) and not file.startswith(_NOT_ANEW):
            del sys.modules[name]


def warm_up() -> None:
    """Import all that the checks need, what is not the project's above all: forks do not import that again."""
    for name in suite.MODULES:
        importlib.import_module(name)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, with other code."""

    def __init__(self, module: str, code: CodeType) -> None:
        self._module, self._code = module, code

    def find_spec(self, fullname: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        path = str(path_of(fullname))
        return importlib.util.spec_from_file_location(fullname, path, loader=_Loader(fullname, path, self._code))


class _Loader(importlib.machinery.SourceFileLoader):
    """Runs code that it was given instead of what is in the file."""

    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        del fullname
        return self._code


def _in_forks(asked: Iterable[tuple[object, Callable[[], object]]], *, jobs: int) -> Iterator[tuple]:
    """Call each in a fork of this process; yield what it was for, and what it returned. None: it did not return."""
    waiting, running = iter(asked), {}
    while True:
        while len(running) < jobs and (following := next(waiting, None)) is not None:
            what, call = following
            running[_fork(call)] = what
        if not running:
            return
        ready, _, _ = select.select([pipe for pipe, _ in running], [], [])
        for pipe, pid in [each for each in running if each[0] in ready]:
            with os.fdopen(pipe) as answer:
                said = answer.read()
            os.waitpid(pid, 0)
            answer = json.loads(said) if said else None
            if isinstance(answer, dict) and "error" in answer:  # else a fault of this suite would seem to kill a mutant
                raise RuntimeError(f"{running[pipe, pid]} could not be played: {answer['error']}")
            yield running.pop((pipe, pid)), answer


def _fork(call: Callable[[], object]) -> tuple[int, int]:
    """Return the end of a pipe from which the answer can be read, and the process."""
    ours, its_own = os.pipe()
    pid = os.fork()
    if pid:
        os.close(its_own)
        return ours, pid
    try:
        for number in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        try:
            answer = json.dumps(call())
        except BaseException as error:  # noqa: BLE001 - the parent raises it
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        with os.fdopen(its_own, "w") as pipe:
            pipe.write(answer)
    finally:
        os._exit(0)
