"""A parameter server stops on a signal, whenever the signal arrives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ENDS = """
import os, signal, socket
from trainer_runtime.ps.server import ParameterServer

class Left(set):
    def __len__(self):  # called while `wait` checks whether all workers have left
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

server = ParameterServer((), socket.create_server(("127.0.0.1", 0)), b"", None)
signal.signal(signal.SIGTERM, lambda *_: server.stop())
server._left = Left()
server.wait()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
server.close()
"""


def test_a_signal_between_the_check_and_the_wait_is_not_lost() -> None:
    path = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", ENDS], env={**os.environ, "PYTHONPATH": path}, check=True, timeout=30)
