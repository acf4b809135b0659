"""A child that somebody stops goes on, and one that ends is still its owner's to wait for."""

from __future__ import annotations

import subprocess
import sys

PARENT = """
import os, signal, subprocess, time
from agent.observe.log import configure
from agent.children import keep_children_going

def state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]

configure("a")
keep_children_going()
child = subprocess.Popen(["sleep", "60"])
for _ in range(2):
    os.kill(child.pid, signal.SIGSTOP)
    give_up_at = time.monotonic() + 30
    while state(child.pid) != "T" and time.monotonic() < give_up_at:
        time.sleep(0.001)
    while state(child.pid) == "T" and time.monotonic() < give_up_at:
        time.sleep(0.001)
    print(state(child.pid) != "T")
child.kill()
print(child.wait())
"""


def test_a_stopped_child_goes_on() -> None:
    """In a process of its own: it would wake those that other tests stop."""
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, timeout=90, check=False)
    assert done.stdout.split() == ["True", "True", "-9"], done.stderr
