"""Runs a test file as several worker processes, as torchrun does, with a free port and one thread each."""

import os
import socket
import subprocess
import sys
from pathlib import Path


def launch(script: str, processes: int, *arguments: object, timeout: float = 240) -> None:
    """Start `script` once per rank with `arguments` and wait; fail with the output of a rank that failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tests = Path(__file__).parent
    paths = [str(tests), str(tests.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    shared |= {"LOCAL_WORLD_SIZE": str(processes), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    workers = [
        subprocess.Popen(
            [sys.executable, script, *map(str, arguments)],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        outputs = [worker.communicate(timeout=timeout)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for rank, (worker, output) in enumerate(zip(workers, outputs, strict=True)):
        assert worker.returncode == 0, f"rank {rank} failed:\n{output[-4000:]}"
