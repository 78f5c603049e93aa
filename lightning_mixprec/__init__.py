"""Mixed precision for PyTorch Lightning: fp32 master weights, loss scaling and per-layer fp32."""

from lightning_mixprec.audit import audit
from lightning_mixprec.callbacks import MasterWeightAveraging
from lightning_mixprec.fallback import FallbackLimitError, LayerFallback
from lightning_mixprec.monitor import PrecisionMonitor
from lightning_mixprec.plan import PrecisionPlan
from lightning_mixprec.policy import PrecisionPolicy
from lightning_mixprec.precision import MasterWeightPrecision
from lightning_mixprec.profiles import ConstantDecay, PowerFunction
from lightning_mixprec.scaler import DynamicLossScaler
from lightning_mixprec.steps import NonFiniteGradientsError

__all__ = [
    "ConstantDecay",
    "DynamicLossScaler",
    "FallbackLimitError",
    "LayerFallback",
    "MasterWeightAveraging",
    "MasterWeightPrecision",
    "NonFiniteGradientsError",
    "PowerFunction",
    "PrecisionMonitor",
    "PrecisionPlan",
    "PrecisionPolicy",
    "audit",
]
