"""The plugin on a GPU that is pretended: what CUDA would refuse is refused, and what makes the host wait is counted."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pretend_cuda import preload

TESTS = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or torch.version.cuda is None or sys.platform != "linux",
    reason="needs a torch that was built for CUDA, and a C compiler to answer for the driver",
)


def test_on_a_pretended_gpu(tmp_path):
    library = str(preload(tmp_path))
    paths = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "LD_PRELOAD": library, "PRETENDED_DRIVER": library}
    own |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "--tb=short", "on_cuda.py"]
    done = subprocess.run(command, cwd=TESTS, env={**os.environ, **own}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
