"""Runs a test file as several worker processes, as torchrun does, with a free port and one thread each."""

import socket

from forked import Forked


def launch(script: str, processes: int, *arguments: object, timeout: float = 240) -> None:
    """Start `script` once per rank with `arguments` and wait; fail with the output of a rank that failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    shared |= {"LOCAL_WORLD_SIZE": str(processes), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    workers = [
        Forked(script, *arguments, environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(processes)
    ]
    try:
        for worker in workers:
            worker.wait(timeout)
    finally:
        for worker in workers:
            worker.kill()
    for rank, worker in enumerate(workers):
        assert worker.returncode == 0, f"rank {rank} failed:\n{worker.output[-4000:]}"
