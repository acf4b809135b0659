"""Which exception ended a worker, from its output."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from agent.workers.last_error import find_error, find_script_error, read_error_file, start_error
from agent.workers.output import Output

PLAIN = """\
step 17
Traceback (most recent call last):
  File "/job/train.py", line 33, in <module>
    main()
  File "/job/train.py", line 7, in main
    raise ValueError("no such thing")
    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
ValueError: no such thing
"""
REFUSED = """\
Traceback (most recent call last):
  File "/job/train.py", line 3, in load
    return table[key]
KeyError: 'a'
trainer_runtime: error: step 8 is not finite: loss
[W1129 17:00:00.0 ProcessGroup.cpp:1] Warning: a library's last word
"""
CHAINED = """\
Traceback (most recent call last):
  File "/job/train.py", line 3, in load
    return table[key]
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/job/train.py", line 5, in load
    raise LookupError("nothing of that name") from None
LookupError: nothing of that name

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/job/train.py", line 9, in <module>
    raise RuntimeError("no data") from error
RuntimeError: no data
"""
DISTRIBUTED = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/job/train.py", line 40, in <module>
another rank's line
[rank1]:     dist.all_reduce(x)
[rank1]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:77, remote process exited
[rank1]: ncclRemoteError: A call failed possibly due to a network error
[rank1]: Last error:
"""
CUDA = """\
Traceback (most recent call last):
  File "/job/train.py", line 2, in <module>
    x.sum()
torch.AcceleratorError: CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call.

Exception raised from c10_cuda_check_implementation at /c10/cuda/CUDAException.cpp:43 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f)
"""
LOADER = """\
Traceback (most recent call last):
  File "/job/train.py", line 2, in <module>
    for batch in loader:
ValueError: Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/torch/utils/data/_utils/worker.py", line 340, in _worker_loop
    data = fetcher.fetch(index)
ValueError: sample 17 is damaged

"""
PROGRESS = " 40%|####      | 4/10 [00:02<00:03,  1.9it/s]" + PLAIN.partition("\n")[2]
BUS_ERROR = """\
ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).
 Traceback (most recent call last):
  File "/job/train.py", line 9, in <module>
    for x in loader: pass
RuntimeError: DataLoader worker (pid 20033) is killed by signal: Bus error. It is possible that
"""
"""Output of torch's handler ends in the next line."""
GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/job/train.py", line 2, in <module>
  |     raise ExceptionGroup("both", [ValueError(1), TypeError(2)])
  | ExceptionGroup: both (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: 1
    +---------------- 2 ----------------
    | TypeError: 2
    +------------------------------------
"""
LATE = """\
Exception ignored in: <function Iterator.__del__ at 0x7f>
Traceback (most recent call last):
  File "/torch/utils/data/dataloader.py", line 1, in __del__
    self.shutdown()
AttributeError: 'NoneType' object has no attribute 'x'
"""
OF_A_THREAD = """\
Exception in thread Thread-1 (run):
Traceback (most recent call last):
  File "/job/train.py", line 1, in run
    raise OSError("in a thread")
OSError: in a thread
"""
SYNTAX = """\
  File "/job/train.py", line 1
    x = = 1
        ^
SyntaxError: invalid syntax
"""
CRASH = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f2a (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/job/train.py", line 3 in <module>

Extension modules: torch._C, numpy.linalg (total: 2)
"""
WATCHDOG = """\
[rank0]:[E1121 22:00:00 ProcessGroupNCCL.cpp:632] some collective operations have failed or timed out.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 Rank 0] Process group watchdog thread terminated with exception: [Rank 0] timeout
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (PLAIN, "ValueError: no such thing"),
        (CHAINED, "RuntimeError: no data"),
        (
            DISTRIBUTED,
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:77, remote process exited",
        ),
        (CUDA, "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
        (LOADER, "ValueError: sample 17 is damaged"),
        (GROUP, "ExceptionGroup: both (2 sub-exceptions)"),
        (PROGRESS, "ValueError: no such thing"),
        (BUS_ERROR, "RuntimeError: DataLoader worker (pid 20033) is killed by signal: Bus error. It is possible that"),
        (PLAIN + LATE, "ValueError: no such thing"),
        (OF_A_THREAD, ""),
        (LATE, ""),
        (SYNTAX, "SyntaxError: invalid syntax"),
        (PLAIN.replace("ValueError: no such thing", "job.main.<locals>.Odd"), "job.main.<locals>.Odd"),
        (PLAIN.replace("ValueError: no such thing", "ready\nAssertionError"), "AssertionError"),
        ("config: no such file\n", ""),
        ("", ""),
    ],
    ids=[
        "plain",
        "chained",
        "distributed",
        "cuda",
        "loader",
        "group",
        "progress-bar",
        "bus-error",
        "ignored-later",
        "thread",
        "ignored",
        "syntax",
        "local",
        "bare",
        "message",
        "nothing",
    ],
)
def test_the_last_exception_ended_it(text: str, error: str) -> None:
    found, traceback = find_error(text, 0)
    assert found == error
    assert (error in traceback) or error.startswith("Syntax")


def test_a_script_that_the_runtime_refused_ended_by_what_it_said_last() -> None:
    assert find_error(REFUSED, 0) == ("step 8 is not finite: loss", "")
    assert find_error(REFUSED + PLAIN, 0)[0] == "ValueError: no such thing"


def test_a_traceback_has_the_exceptions_that_led_to_it() -> None:
    assert find_error("step 1\n" + CHAINED, 0)[1] == CHAINED.strip()
    assert find_error("step 1\n" + LOADER, 0)[1] == LOADER.strip()
    assert find_error(PLAIN + "\n" + PLAIN, 0)[1] == PLAIN.partition("\n")[2].strip(), "an older one did not"


@pytest.mark.parametrize("death", [signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGILL])
def test_a_crash_is_described_by_its_dump_not_by_an_earlier_exception(death: int) -> None:
    error, traceback = find_error(PLAIN + CRASH, death)
    assert error == "Fatal Python error: Segmentation fault"
    assert traceback.endswith('File "/job/train.py", line 3 in <module>'), "without the list of modules"
    assert find_error(PLAIN, death) == ("", "")


def test_an_uncaught_cpp_exception_describes_a_crash_better_than_the_dump() -> None:
    """A rank whose NCCL watchdog gives up ends like this."""
    error, traceback = find_error(WATCHDOG + CRASH, signal.SIGABRT)
    assert error.startswith("c10::DistBackendError: [PG ID 0 Rank 0] Process group watchdog")
    assert traceback.startswith("Fatal Python error")
    nameless = "terminate called after throwing an instance of 'int'\n"
    assert find_error(nameless, signal.SIGABRT)[0] == "int"


@pytest.mark.parametrize(
    ("death", "is_told"), [(signal.SIGKILL, False), (signal.SIGTERM, False), (signal.SIGINT, True)]
)
def test_a_killed_worker_did_not_end_by_an_exception(death: int, is_told: bool) -> None:  # noqa: FBT001 - a row
    assert bool(find_error(PLAIN, death)[0]) is is_told


def test_what_goes_into_records_is_bounded_and_can_be_encoded() -> None:
    text = PLAIN.replace("no such thing", "x" * 20_000 + "\udc80")
    error, traceback = find_error(text, 0)
    assert len(error) <= 500
    assert len(traceback) <= 8002
    (error + traceback).encode()


def test_reading_is_quick_whatever_is_there() -> None:
    """It delays the report. This is the worst of what is kept of standard error, many times over."""
    began = time.monotonic()
    for text in ("Traceback (most recent call last):\n" * 450, "terminate called " * 1000, "a.b" * 5000, "(" * 16_000):
        find_error(text, 0)
        find_error(text, signal.SIGABRT)
    assert time.monotonic() - began < 60


def recorded(error: object, callstack: object = PLAIN) -> dict[str, object]:
    return {"message": {"message": error, "extraInfo": {"py_callstack": callstack, "timestamp": "1"}}}


def written(tmp_path: Path, data: object) -> bytes:
    path = tmp_path / "error.json"
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    return os.fsencode(path)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (recorded("ValueError: no such thing"), "ValueError: no such thing"),
        (
            recorded("BackendError: 1", PLAIN.replace("ValueError", "torch.BackendError")),
            "torch.BackendError: no such thing",
        ),
        (recorded("Odd: one\ntwo", "no stack"), "Odd: one"),
        ({"message": "Signal 9 (SIGKILL) received by PID 77", "timestamp": 1}, "Signal 9 (SIGKILL) received by PID 77"),
        ({"message": CHAINED}, "RuntimeError: no data"),
    ],
    ids=["recorded", "full-name", "no-stack", "text", "text-with-traceback"],
)
def test_torchs_file_is_read(tmp_path: Path, data: object, error: str) -> None:
    """As `record_exception` writes it, and the form with text alone."""
    found, traceback = read_error_file(written(tmp_path, data), 60)
    assert found == error
    assert not traceback or "Traceback" in traceback or traceback == "no stack"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"7",
        b"null",
        b'{"message": 7}',
        b'{"message": {}}',
        b"[" * 100_000,
        recorded(7),
        recorded("E: x", 7),
        recorded("E: x", None),
        {"message": {"message": "E: x", "extraInfo": []}},
        {},
    ],
)
def test_a_file_of_another_kind_is_ignored(tmp_path: Path, data: object) -> None:
    assert read_error_file(written(tmp_path, data), 60) == ("", "")


def test_no_file_delays_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing, a directory, a FIFO without a writer, a file without an end, and an unreachable file server."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    began = time.monotonic()
    for path in (b"", b"/no/such", os.fsencode(tmp_path), os.fsencode(fifo), b"/dev/zero"):
        assert read_error_file(path, 60) == ("", "")
    assert time.monotonic() - began < 20, "it was not waited for"
    path = written(tmp_path, recorded("ValueError: no such thing"))
    answers = threading.Event()

    def hang(*_args: object) -> int:
        answers.wait(60)
        raise OSError

    monkeypatch.setattr(os, "open", hang)
    began = time.monotonic()
    assert read_error_file(path, 0.2) == ("", "")
    assert time.monotonic() - began < 20
    answers.set()


def test_a_crash_leaves_its_stack_in_the_tail_beside_the_list_of_modules(tmp_path: Path) -> None:
    """The list is one line, and may be longer than the whole tail."""
    output = Output(os.fsencode(tmp_path / "log"), None, pytest.fail, lambda: None)
    modules = ", ".join(f"package.module{n}" for n in range(400))
    output.feed(2, CRASH.replace("torch._C", modules).encode())
    assert "Fatal Python error" in output.tail
    assert 'File "/job/train.py", line 3' in output.tail
    assert find_error(output.stderr_text, signal.SIGSEGV)[1] in output.tail
    assert len(output.tail.encode()) <= 4096
    output.end()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("elastic-agent: cannot run /v/bin/python: No such file\n", "cannot run /v/bin/python: No such file"),
        ("begins\n", ""),
        ("", ""),
    ],
)
def test_the_last_line_states_why_a_worker_could_not_be_started(text: str, why: str) -> None:
    assert start_error(text) == why


def test_a_tail_that_fits_is_whole(tmp_path: Path) -> None:
    output = Output(os.fsencode(tmp_path / "log"), None, pytest.fail, lambda: None)
    text = "x" * 3000 + "\nlast\n"
    output.feed(2, text.encode())
    assert output.tail == text
    output.end()


TYPO = """\
Traceback (most recent call last):
  File "/job/typo.py", line 4, in <module>
    import torchh
ModuleNotFoundError: No module named 'torchh'
"""


USAGE = """\
usage: train.py [-h] [--epochs EPOCHS]
train.py: error: unrecognized arguments: --epoch=3
"""


def test_a_wrong_option_is_the_error_of_a_script() -> None:
    assert find_error(USAGE, 0) == ("train.py: error: unrecognized arguments: --epoch=3", "")


@pytest.mark.parametrize(
    ("text", "script_error"),
    [
        (TYPO, "ModuleNotFoundError: No module named 'torchh' (/job/typo.py, line 4)"),
        (PLAIN, "ValueError: no such thing (/job/train.py, line 7)"),
        (
            "  File \"/job/t.py\", line 3\n    if x\n        ^\nSyntaxError: expected ':'\n",
            "SyntaxError: expected ':' (/job/t.py, line 3)",
        ),
        (USAGE, "train.py: error: unrecognized arguments: --epoch=3"),
        ("Usage: train.py [OPTIONS]\n\nError: No such option: --epoch\n", "Error: No such option: --epoch"),
        (USAGE + "something else\n", ""),
        ("train.py: error: it was not found\n", ""),
        ("Usage: train.py [OPTIONS]\nTry 'train.py -h' for help.\n\nError: Missing option\n", "Error: Missing option"),
        ("Usage: 80 % of the GPU\nstep 3\nError: the connection was lost\n", ""),
        (USAGE.replace("train.py: error", "other.py: error"), ""),
        (CHAINED, ""),  # a RuntimeError: torch raises it for many reasons
        (CUDA, ""),
        (DISTRIBUTED, ""),
        (TYPO.replace("ModuleNotFoundError: No module named 'torchh'", "OSError: [Errno 116] Stale file handle"), ""),
        (TYPO.replace("No module named 'torchh'", "libcuda.so.1: cannot open shared object file"), ""),
        (TYPO.replace("ModuleNotFoundError", "MemoryError"), ""),
        (CHAINED.replace("KeyError: 'a'", "ConnectionError: x").replace("RuntimeError: no data", "ValueError: x"), ""),
        ("\n".join(f"[rank0]: {line}" for line in TYPO.splitlines()), ""),  # there was a process group
        (TYPO + "resource_tracker: There appear to be leaked objects\n", ""),  # possibly not the last line
        ("", ""),
        ("ValueError: told without a traceback\n", ""),
    ],
)
def test_a_mistake_in_the_script_is_distinguished_from_a_passing_failure(text: str, script_error: str) -> None:
    assert find_script_error(text) == script_error
