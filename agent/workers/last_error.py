"""Finds the exception that ended a worker: in the file that torch's `@record` writes, else in its standard error.

Part of the guardian (`guardian.py`), so standard library only, and quick to import. The file is beside the rank's log,
so reading it may block forever if a file server is unreachable. The file and standard error are written by a script and
may contain anything.

The last exception counts. Where one exception led to another, the last one ended the worker; where a data loader's
worker failed, it is that worker's own. Exceptions that Python reports and ignores, and those that ended a thread, did
not end the worker. Torch may put a prefix before each line (`[rank0]: `).
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
"""Signals that `faulthandler` reports."""
_AGENT_PREFIX = "elastic-agent: "
_HEADER = "Traceback (most recent call last):"
_FRAME = '  File "'
_EXCEPTION = re.compile(r"[^\W\d][\w.<>]*: ?.*|[^\W\d][\w.<>]*[A-Z][\w.<>]*")
"""A single word must look like a class name: other threads print lines too."""
_SYNTAX_ERROR = re.compile(r"^(?:SyntaxError|IndentationError|TabError): .*", re.MULTILINE)
"""A syntax error in the script itself: it has no traceback header."""
_FATAL = re.compile(r"Fatal Python error: .*")
_EXTENSIONS = "\nExtension modules: "
_FRAME_LINE = re.compile(r'  File "(.*)", line (\d+)(?:, in .*)?')
_CODE_ERRORS = {
    *("ImportError", "ModuleNotFoundError", "NameError", "UnboundLocalError", "AttributeError", "TypeError"),
    *("ValueError", "LookupError", "KeyError", "IndexError", "AssertionError", "ZeroDivisionError"),
    *("NotImplementedError", "SyntaxError", "IndentationError", "TabError"),
}
"""Exceptions that a script error raises each time. Excluded are errors of the system, of files, network,
memory and devices, which may be gone at the next try; torch raises RuntimeError for many of these."""
_USAGE_ERRORS = (
    re.compile(r"^usage: ([^\n\[]+?) .*^(\1: error: [^\n]+)\n*\Z", re.MULTILINE | re.DOTALL),
    re.compile(r"^Usage: ([^\n]+)\n(?:Try [^\n]+\n)?\n*(Error: [^\n]+)\n*\Z", re.MULTILINE),
)
"""What argparse and click print last about a wrong command line."""
_SHARED_LIBRARY = "shared object"
"""Part of an ImportError's text if a system library could not be loaded."""
_REFUSED = re.compile(r"^trainer_runtime: error: (.+)$", re.MULTILINE)
"""What the runtime prints before it ends a script that must not be started again."""
_THROWN = re.compile(r"terminate called after throwing an instance of '(.*)'(?:\n.*?what\(\): +(.*))?")
_SURVIVED_MARKERS = (
    "Exception ignored",
    "--- Logging error ---",
    "Exception in thread",
    "Error in atexit",
    "future: <",
)
"""Start of the line before a traceback that did not end the worker."""
_CHAINED = ("another exception occurred:", "direct cause of the following exception:")

ErrorText = tuple[str, str]
"""The exception on one line, and its traceback. Empty: unknown."""
_NOTHING = ("", "")


def read_error_file(path: bytes, within_s: float = _FILE_WITHIN_S) -> ErrorText:
    """Read the file that torch's `@record` writes; empty if it is missing, invalid, or cannot be read in time."""
    found: list[ErrorText] = []
    reader = threading.Thread(target=lambda: found.append(_parse(_read(path))), daemon=True)
    reader.start()
    reader.join(within_s)
    return found[0] if found else _NOTHING


def _read(path: bytes) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # otherwise a FIFO would block
        with open(fd, "rb") as file:  # noqa: PTH123 - opens a descriptor
            return file.read(_FILE_BYTES) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    except OSError:
        return b""


def _parse(data: bytes) -> ErrorText:
    """Parse `{"message": {"message": …, "extraInfo": {"py_callstack": …}}}` or `{"message": …}`."""
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
    return found if found[0] else _bounded(error, "" if is_text else traceback)


def find_error(text: str, fatal_signal: int) -> ErrorText:
    """Find the last exception in the end of a worker's standard error.

    Args:
        text: the end of its standard error.
        fatal_signal: see `exit_causes.fatal_signal_of`.
    """
    if fatal_signal in _CRASHES:
        return _crash(text)
    if fatal_signal not in {0, signal.SIGINT}:
        return _NOTHING  # an older exception that the worker survived
    found = _exception(text)
    return found if found[0] else _crash(text)


def start_error(text: str) -> str:
    """Return the error that `worker_start.py` printed because the worker could not be started; empty: none."""
    last = text.rstrip("\n").rpartition("\n")[2]
    return _bounded(last.removeprefix(_AGENT_PREFIX), "")[0] if last.startswith(_AGENT_PREFIX) else ""


def _exception(text: str) -> ErrorText:
    refused = _last(_REFUSED, text)
    if refused and _HEADER not in text[refused.end() :]:
        return _bounded(refused[1], "")
    lines = text.split("\n")
    for at in reversed(range(len(lines))):
        if not lines[at].endswith(_HEADER):
            continue
        prefix = _prefix(lines, at)
        if at and lines[at - 1].removeprefix(prefix).startswith(_SURVIVED_MARKERS):
            continue
        for line in lines[at + 1 :]:
            body = line[len(prefix) :] if line.startswith(prefix) else ""  # a line of another process
            if _EXCEPTION.fullmatch(body):
                return _bounded(body, "\n".join(lines[_first_of_chain(lines, at) :]))
    error = _last(_SYNTAX_ERROR, text)
    return _bounded(error.group() if error else _usage_error(text), "")


def _usage_error(text: str) -> str:
    """Return the line in which argparse or click refuses the command line, if it is the last one; empty: it is not."""
    found = (pattern.search(text) for pattern in _USAGE_ERRORS)
    return next((match[2] for match in found if match), "")


def find_script_error(text: str) -> str:
    """Describe the script error that ended it. The text is the same each time that the error ends it.

    Args:
        text: the end of its standard error.

    Returns:
        The exception, and the line of code that raised it. Empty if the end may have another cause, or if a process
        group existed by then, which torch's line prefix shows: later errors may depend on other ranks.
    """
    lines = text.split("\n")
    if usage_error := _usage_error(text):  # the command line is the same at each try
        return _encodable(usage_error[:_ERROR_CHARACTERS])
    headers = [number for number, line in enumerate(lines) if line == _HEADER]
    if any(line.endswith(_HEADER) and line != _HEADER for line in lines):
        return ""
    began = _first_of_chain(lines, headers[-1]) if headers else 0
    errors = [line for line in lines[began:] if _EXCEPTION.fullmatch(line)]
    frames = [found for line in lines[began:] if (found := _FRAME_LINE.fullmatch(line))]
    is_code_error = all(error.partition(":")[0] in _CODE_ERRORS and _SHARED_LIBRARY not in error for error in errors)
    if not errors or not frames or not is_code_error:
        return ""
    return _encodable(f"{errors[-1][:_ERROR_CHARACTERS]} ({frames[-1][1]}, line {frames[-1][2]})")


def _prefix(lines: list[str], at: int) -> str:
    """Find the prefix of each line. The line after the header shows it; the header may follow a progress bar's text."""
    before, frame, _ = lines[at + 1].partition(_FRAME) if at + 1 < len(lines) else ("", "", "")
    return before if frame else lines[at].removesuffix(_HEADER)


def _first_of_chain(lines: list[str], at: int) -> int:
    """Return the line of the first traceback in the chain that leads to the one at `at`."""
    is_led_to = lines[at].endswith("Original " + _HEADER) or (at > 1 and lines[at - 2].endswith(_CHAINED))
    earlier = [number for number in range(at) if _HEADER in lines[number]] if is_led_to else []
    return _first_of_chain(lines, earlier[-1]) if earlier else at


def _crash(text: str) -> ErrorText:
    """Find what C++ and `faulthandler` print when a process ends by a signal that it raised itself."""
    thrown, dump = _last(_THROWN, text), _last(_FATAL, text)
    stacks = text[dump.start() :].partition(_EXTENSIONS)[0] if dump else ""
    if thrown:
        return _bounded(": ".join(filter(None, thrown.groups())), stacks)
    return _bounded(dump.group(), stacks) if dump else _NOTHING


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for found in pattern.finditer(text):  # noqa: B007 - the last match is wanted
        pass
    return found


def _bounded(error: str, traceback: str) -> ErrorText:
    """Limit the texts, which go into records, and replace characters that cannot be encoded."""
    error = error.strip().partition("\n")[0][:_ERROR_CHARACTERS]
    traceback = traceback.strip()
    if len(traceback) > _TRACEBACK_CHARACTERS:
        traceback = "…\n" + traceback[-_TRACEBACK_CHARACTERS:]
    return _encodable(error), _encodable(traceback)


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()
