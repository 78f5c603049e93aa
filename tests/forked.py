"""Starts programs as processes of their own, forked from one that has imported what all of them need.

A process takes five seconds of CPU to import Lightning and what Lightning imports, and the suite starts a hundred. This
file, run as a program, imports them once, before there is any thread, and forks for every line that it is sent. What
is started has its own arguments, environment, directory, output, exit status and session, and can be killed; how a
fresh interpreter starts, `tests/test_docs.py` sees. What still runs when the tests end, or are killed, ends with them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # read when torch is imported: for all alike


class Forked:
    """A program that runs; like `subprocess.Popen`, with its output in one file.

    Args:
        command: What stands after `python`: a script, or `-m` and a module, and arguments.
        cwd: Where it runs.
        environment: Beside that of this process, which it has with one thread and with tests and recipes to import.
    """

    def __init__(self, *command: object, cwd: Path = ROOT, environment: Mapping[str, str] | None = None) -> None:
        inherited = {key: value for key, value in os.environ.items() if key != "PL_GLOBAL_SEED"}
        paths = [str(ROOT), str(TESTS), *filter(None, [inherited.get("PYTHONPATH")])]
        variables = {**inherited, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})}
        log, name = tempfile.mkstemp(prefix="forked-", suffix=".log")
        os.close(log)
        self._log = Path(name)
        self.returncode: int | None = None
        self.pid: int = _server().ask(command=[*map(str, command)], cwd=str(cwd), environment=variables, log=name)

    @property
    def output(self) -> str:
        """What it has written so far, to stdout and stderr."""
        return self._log.read_text(errors="replace")

    def poll(self) -> int | None:
        """Its exit status, if it has ended; that of a signal is negative."""
        if self.returncode is None:
            self.returncode = _server().ask(ended=self.pid)
        return self.returncode

    def wait(self, timeout: float = 240) -> int:
        """Its exit status, when it has ended; killed if it has not by then."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"after {timeout} s:\n{self.output[-4000:]}")
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it, if it runs, at once."""
        self.send_signal(signal.SIGKILL)


def run(*command: object, timeout: float = 240, **where: Any) -> Forked:
    """Run a program to its end; see :class:`Forked`."""
    started = Forked(*command, **where)
    started.wait(timeout)
    return started


class _Server:
    """This file as a program, that forks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, **ONE_THREAD},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._end)

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


_server = functools.cache(_Server)


def _import_what_all_need() -> None:
    sys.path[:0] = [str(ROOT), str(TESTS)]
    import lightning.pytorch  # noqa: F401
    import pytest  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401

    import recipes.train  # noqa: F401

    programs = [name for name, module in sys.modules.items() if hasattr(module, "main") and name.startswith("recipes.")]
    for name in programs:  # each is to be run as `__main__`, and once
        del sys.modules[name]


def _serve() -> None:
    _import_what_all_need()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest
    replies = os.fdopen(os.dup(1), "w")
    running: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], os.WNOHANG)
            running.discard(pid)
            reply = os.waitstatus_to_exitcode(status) if pid else None
        else:
            reply = os.fork()
            if reply == 0:
                os._exit(_child(**request))
            running.add(reply)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    for pid in running:  # pytest is gone, perhaps killed
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _child(command: list[str], cwd: str, environment: dict[str, str], log: str) -> int:
    """What a fresh interpreter does with `command`, in this process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    os.chdir(cwd)
    paths = environment["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    status = 0
    try:
        if command[0] == "-m":
            sys.path.insert(0, cwd)
            sys.argv[:] = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = command
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    return status


if __name__ == "__main__":
    _serve()
