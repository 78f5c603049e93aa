"""Programs that tests start end with the tests, however those end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import TESTS

SERVE = "import forked; forked._import_what_all_need = lambda: None; forked._serve()"
PROGRAM = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]).pid, flush=True)
time.sleep(100)
"""


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_still_runs_ends_with_the_tests(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    log = tmp_path / "log"
    log.touch()
    request = {"command": ["program.py"], "cwd": str(tmp_path), "environment": {"PYTHONPATH": ""}, "log": str(log)}
    with subprocess.Popen(
        [sys.executable, "-c", SERVE],
        cwd=TESTS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        started = [int(server.stdout.readline())]
        deadline = time.monotonic() + 30
        while not log.read_text().strip():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        started.append(int(log.read_text()))
        assert all(runs(pid) for pid in started)
        server.stdin.close()  # as the system does for pytest when it is killed
        assert server.wait(timeout=30) == 0
    while any(runs(pid) for pid in started):
        assert time.monotonic() < deadline
        time.sleep(0.01)
