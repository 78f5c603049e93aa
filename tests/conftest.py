"""Three workers share the suite (`pytest -n 0` is one process); files stay whole, and one has all that start processes.

Processes of a test wait for each other, so two such tests at a time would compete for the cores of a small machine.
While they wait, a core of two would be idle without a third worker.
"""

import os

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; also for the processes that tests start

SEVERAL_PROCESSES = {
    "test_ddp_failures.py",
    "test_ddp_reduction.py",
    "test_ddp_variants.py",
    "test_distributed.py",
    "test_multi_device.py",
    "test_sharding.py",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        name = item.path.name
        item.add_marker(pytest.mark.xdist_group("processes" if name in SEVERAL_PROCESSES else name))
