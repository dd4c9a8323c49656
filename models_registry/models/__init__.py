"""What the model registry stores."""

from models_registry.models.benchmark import Benchmark, BenchmarkPoint
from models_registry.models.calibration import SpeculationCalibration
from models_registry.models.version import EngineAllowance, Model, ModelVersion, Validation, VersionState

__all__ = [
    "Benchmark",
    "BenchmarkPoint",
    "EngineAllowance",
    "Model",
    "ModelVersion",
    "SpeculationCalibration",
    "Validation",
    "VersionState",
]
