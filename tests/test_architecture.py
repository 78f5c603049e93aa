"""Who may import whom (the layout is the architecture)."""

import ast
import os
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Modules that know torch alone, and which of each other they may know.
TORCH_ONLY = {
    "eligible": set(),
    "plan": set(),
    "practice": set(),
    "processor": set(),
    "policy": {"eligible", "opaque", "plan", "practice", "reparametrised", "widening"},
    "reparametrised": {"opaque", "widening"},
    "float8": {"apart", "eligible", "layers", "policy"},
    "scaler": set(),
    "buffers": {"opaque"},
    "opaque": set(),
    "norms": {"opaque"},
    "autocast": set(),
    "calls": set(),
    "widening": set(),
    "layers": {"autocast", "calls", "norms", "opaque", "subclass", "widening"},
    "subclass": set(),
    "shards": set(),
    "sharding": {"opaque", "plan", "policy", "widening"},
    "apart": {"opaque"},
    "containers": set(),
    "replay": {"apart", "autocast", "containers", "layers", "opaque", "widening"},
    "magnitudes": {"containers", "opaque", "shards"},
    "overflow": {"apart", "containers", "magnitudes", "opaque", "replay"},
    "inside": {"containers", "opaque"},
    "fallback": set(),
    "layer_stats": {"containers", "formats", "opaque", "shards"},
    "health": {"layer_stats"},
    "feeding": {"master", "opaque", "widening"},
    "conversion": {
        "feeding",
        "float8",
        "given",
        "layers",
        "master",
        "plan",
        "policy",
        "reparametrised",
        "state_hooks",
        "storage",
        "widening",
    },
    "diagnosis": {"apart", "inside", "magnitudes", "opaque", "overflow", "ranks", "replay", "scaler"},
    "formats": set(),
    "observation": {"containers", "formats", "opaque"},
    "trial": {
        "autocast",
        "containers",
        "layers",
        "magnitudes",
        "observation",
        "opaque",
        "overflow",
        "plan",
        "policy",
        "replay",
    },
    "float8_trial": set(),
    "audit_result": {"formats", "policy"},
    "audit": {
        "audit_result",
        "containers",
        "float8_trial",
        "formats",
        "magnitudes",
        "observation",
        "overflow",
        "plan",
        "policy",
        "trial",
    },
    "encoding": set(),
    "storage": {"encoding"},
    "counts": set(),
    "probe": {"counts"},
    "bucket_state": {"storage", "widening"},
    "scratch": {"storage"},
    "fused_adam": {"bucket_state", "layout", "scratch", "storage"},
    "step_guard": set(),
    "exchange": {"bucket_state"},
    "layout": {"storage", "wide_gradients"},
    "borrow": {
        "bucket_state",
        "counts",
        "exchange",
        "fused_adam",
        "layout",
        "probe",
        "scratch",
        "step_guard",
        "storage",
    },
    "gradients": {"shards"},
    "given": {"opaque", "widening"},
    "state_hooks": {"given", "opaque"},
    "wide_gradients": {"gradients", "widening"},
    "ranks": set(),
    "master": {
        "borrow",
        "exchange",
        "given",
        "opaque",
        "ranks",
        "state_hooks",
        "storage",
        "wide_gradients",
        "widening",
    },
    "reduction": {"master", "widening"},
    "edits": {"master", "storage", "widening"},
    "in_fp32": {"widening"},
    "weight_memory": {"in_fp32", "opaque", "storage", "widening"},
    "edits_seen": {"in_fp32", "storage", "weight_memory", "widening"},
    "edit_watch": {"edits_seen", "in_fp32", "master", "weight_memory"},
    "penalties": set(),
    "roll_call": set(),
    "profiles": set(),
    "snapshots": set(),
    "posthoc": {"profiles", "snapshots"},
    "mailbox": set(),
    "ledger": {"gradients", "mailbox", "master", "ranks", "reduction", "scaler", "shards", "step_guard"},
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def test_torch_only_modules_know_neither_lightning_nor_more_of_each_other_than_they_need():
    for name, known in TORCH_ONLY.items():
        allowed = {f"lightning_mixprec.{other}" for other in known}
        for module in imports(ROOT / "lightning_mixprec" / f"{name}.py"):
            assert module.split(".")[0] not in {"lightning", "hydra", "omegaconf", "recipes"}, name
            assert not module.startswith("lightning_mixprec") or module in allowed, name


def test_nothing_in_the_package_imports_hydra_or_recipes():
    for path in (ROOT / "lightning_mixprec").glob("*.py"):
        assert not {module.split(".")[0] for module in imports(path)} & {"hydra", "omegaconf", "recipes"}


def test_no_catch_all_modules():
    names = {path.stem for folder in ("lightning_mixprec", "recipes") for path in (ROOT / folder).glob("*.py")}
    assert not names & {"utils", "common", "helpers", "misc"}


def test_torchao_is_optional():
    """One module imports it, and that one is imported inside functions."""
    for path in (ROOT / "lightning_mixprec").glob("*.py"):
        top = {node.module for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)}
        if path.stem != "float8":
            assert not any(module.startswith("torchao") for module in imports(path)), path
            assert "lightning_mixprec.float8" not in top, path


def test_workers_share_files_and_not_tests(request):
    """pytest-xdist tells them by the ends of names. Without, each worker starts all processes that files share."""
    end = "@test_architecture.py" if "PYTEST_XDIST_WORKER" in os.environ else "share_files_and_not_tests"
    assert request.node.nodeid.endswith(end)
