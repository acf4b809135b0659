"""The exception that ended a worker: from the file that torch's `@record` writes, else from its standard error.

Part of the guardian (`guardian.py`), so standard library only, and quick to import. The file is beside the rank's log,
so a file server that is gone can hold up its reading for ever. What is in it, and in standard error, is the work of a
script, and may be anything.

Of several exceptions the last one counts: where one led to another, it is the one that ended the worker, and where a
data loader's worker failed, it is that one's own. What Python tells of an exception that it then ignores, or of one
that ended a thread, is no end of a worker. Each line may come with what torch puts before it (`[rank0]: `).
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import threading

_FILE_BYTES = 1 << 20
_FILE_WITHIN_S = 0.5
_ERROR_CHARACTERS = 500
_TRACEBACK_CHARACTERS = 8000

_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""What `faulthandler` tells of."""
_OURS = "elastic-agent: "
_HEADER = "Traceback (most recent call last):"
_FRAME = '  File "'
_EXCEPTION = re.compile(r"[^\W\d][\w.<>]*: ?.*|[^\W\d][\w.<>]*[A-Z][\w.<>]*")
"""A word alone must look like a class: other threads write lines too."""
_SYNTAX_ERROR = re.compile(r"^(?:SyntaxError|IndentationError|TabError): .*", re.MULTILINE)
"""Of the script itself: it has no header."""
_FATAL = re.compile(r"Fatal Python error: .*")
_EXTENSIONS = "\nExtension modules: "
_FRAME_LINE = re.compile(r'  File "(.*)", line (\d+)(?:, in .*)?')
_OF_CODE = {
    *("ImportError", "ModuleNotFoundError", "NameError", "UnboundLocalError", "AttributeError", "TypeError"),
    *("ValueError", "LookupError", "KeyError", "IndexError", "AssertionError", "ZeroDivisionError"),
    *("NotImplementedError", "SyntaxError", "IndentationError", "TabError"),
}
"""Exceptions that a mistake in a script raises, each time. Not those of the system, of files, the network, memory or
devices, which may have ended when the script is tried again; RuntimeError is what torch makes of many of these."""
_LIBRARY = "shared object"
"""In an ImportError: a file of the system could not be opened."""
_THROWN = re.compile(r"terminate called after throwing an instance of '(.*)'(?:\n.*?what\(\): +(.*))?")
_NO_END = ("Exception ignored", "--- Logging error ---", "Exception in thread", "Error in atexit", "future: <")
"""So begins the line before the traceback of an exception that ended no worker."""
_CHAINED = ("another exception occurred:", "direct cause of the following exception:")

Found = tuple[str, str]
"""The exception, on one line, and its traceback. Empty: none is known."""
_NOTHING = ("", "")


def read_error_file(path: bytes, within_s: float = _FILE_WITHIN_S) -> Found:
    """What torch's `@record` has written; nothing if it is not there, cannot be read in time, or is no such file."""
    found: list[Found] = []
    reader = threading.Thread(target=lambda: found.append(_parse(_read(path))), daemon=True)
    reader.start()
    reader.join(within_s)
    return found[0] if found else _NOTHING


def _read(path: bytes) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # else a FIFO would block
        with open(fd, "rb") as file:  # noqa: PTH123 - of a descriptor
            return file.read(_FILE_BYTES) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    except OSError:
        return b""


def _parse(data: bytes) -> Found:
    """It is `{"message": {"message": …, "extraInfo": {"py_callstack": …}}}`, or `{"message": …}`."""
    error: object
    traceback: object
    try:
        message = json.loads(data)["message"]
        is_text = isinstance(message, str)
        error = message if is_text else message["message"]
        traceback = message if is_text else message["extraInfo"]["py_callstack"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return _NOTHING
    if not isinstance(error, str) or not isinstance(traceback, str):
        return _NOTHING
    found = _exception(traceback)
    return found if found[0] else _found(error, "" if is_text else traceback)


def find_error(text: str, death: int) -> Found:
    """What the end of a worker's standard error tells of its last exception. `death`: see `postmortem.death_of`."""
    if death in _CRASHES:
        return _crash(text)
    if death not in {0, signal.SIGINT}:
        return _NOTHING  # an older exception, which it survived
    found = _exception(text)
    return found if found[0] else _crash(text)


def not_started(text: str) -> str:
    """Why what should have become the worker could not: what `worker_start.py` wrote last; empty: it wrote nothing."""
    last = text.rstrip("\n").rpartition("\n")[2]
    return _found(last.removeprefix(_OURS), "")[0] if last.startswith(_OURS) else ""


def _exception(text: str) -> Found:
    lines = text.split("\n")
    for at in reversed(range(len(lines))):
        if not lines[at].endswith(_HEADER):
            continue
        prefix = _prefix(lines, at)
        if at and lines[at - 1].removeprefix(prefix).startswith(_NO_END):
            continue
        for line in lines[at + 1 :]:
            body = line[len(prefix) :] if line.startswith(prefix) else ""  # another's
            if _EXCEPTION.fullmatch(body):
                return _found(body, "\n".join(lines[_first_of_chain(lines, at) :]))
    error = _last(_SYNTAX_ERROR, text)
    return _found(error.group(), "") if error else _NOTHING


def find_mistake(text: str) -> str:
    """What in the script itself ended it, and where; the same words each time that it does.

    Args:
        text: the end of its standard error.

    Returns:
        The exception, and the line of code that raised it. Empty: it may be something else that ended it, or a process
        group existed by then, which is seen by torch's prefix: what happens after that may depend on others.
    """
    lines = text.split("\n")
    headers = [number for number, line in enumerate(lines) if line == _HEADER]
    if any(line.endswith(_HEADER) and line != _HEADER for line in lines):
        return ""
    began = _first_of_chain(lines, headers[-1]) if headers else 0
    errors = [line for line in lines[began:] if _EXCEPTION.fullmatch(line)]
    frames = [found for line in lines[began:] if (found := _FRAME_LINE.fullmatch(line))]
    is_of_code = all(error.partition(":")[0] in _OF_CODE and _LIBRARY not in error for error in errors)
    if not errors or not frames or not is_of_code:
        return ""
    return _encodable(f"{errors[-1][:_ERROR_CHARACTERS]} ({frames[-1][1]}, line {frames[-1][2]})")


def _prefix(lines: list[str], at: int) -> str:
    """What is put before each line: seen in the one after the header, which itself may end a line of a progress bar."""
    before, frame, _ = lines[at + 1].partition(_FRAME) if at + 1 < len(lines) else ("", "", "")
    return before if frame else lines[at].removesuffix(_HEADER)


def _first_of_chain(lines: list[str], at: int) -> int:
    """Where the first traceback begins, of those that led to the one at that line."""
    is_led_to = lines[at].endswith("Original " + _HEADER) or (at > 1 and lines[at - 2].endswith(_CHAINED))
    earlier = [number for number in range(at) if _HEADER in lines[number]] if is_led_to else []
    return _first_of_chain(lines, earlier[-1]) if earlier else at


def _crash(text: str) -> Found:
    """What C++ and `faulthandler` say when a process ends by a signal of its own making."""
    thrown, dump = _last(_THROWN, text), _last(_FATAL, text)
    stacks = text[dump.start() :].partition(_EXTENSIONS)[0] if dump else ""
    if thrown:
        return _found(": ".join(filter(None, thrown.groups())), stacks)
    return _found(dump.group(), stacks) if dump else _NOTHING


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for found in pattern.finditer(text):  # noqa: B007 - the last one is what is asked for
        pass
    return found


def _found(error: str, traceback: str) -> Found:
    """Within bounds, since it goes into records, and of characters that every codec takes."""
    error = error.strip().partition("\n")[0][:_ERROR_CHARACTERS]
    traceback = traceback.strip()
    if len(traceback) > _TRACEBACK_CHARACTERS:
        traceback = "…\n" + traceback[-_TRACEBACK_CHARACTERS:]
    return _encodable(error), _encodable(traceback)


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()
