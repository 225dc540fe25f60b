"""Children of a fork: what a process has once can be used there, whatever other threads of the parent were doing."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = [pytest.mark.real, pytest.mark.skipif(sys.platform == "win32", reason="needs fork")]

SCRIPT = """
import gc, os, signal, threading

inside, go, parent = threading.Event(), threading.Event(), os.getpid()

def hold():
    if os.getpid() == parent:
        inside.set()
        go.wait()

{before}
threading.Thread(target=other, daemon=True).start()
inside.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)  # a lock that nobody opens
    {in_child}
    os._exit(0)
_, how = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(how))
"""

MADE_ONCE = """
from cbatch.backend.threads import once

@once
def other():
    hold()
    return 1
"""

LLAMA_LOG = """
from cbatch.backend.llama import log as module
log = module.llama_log()
module.llama_cpp.llama_log_set = lambda *given: hold()

def other():
    log.install()
"""

UNCOLLECTED = """
from cbatch.support.garbage import uncollected

def other():
    with uncollected():
        hold()
"""


@pytest.mark.parametrize(
    ("before", "in_child"),
    [
        (MADE_ONCE, "assert other() == 1"),
        (LLAMA_LOG, "log.install(); log.remove()"),
        (
            UNCOLLECTED,
            "assert gc.isenabled(); block = uncollected(); block.__enter__(); assert not gc.isenabled()",
        ),
    ],
    ids=["once", "log", "uncollected"],
)
def test_child_waits_for_no_thread_of_its_parent(before: str, in_child: str) -> None:
    source = SCRIPT.format(before=textwrap.dedent(before), in_child=in_child)
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", source],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("0\n", "")
