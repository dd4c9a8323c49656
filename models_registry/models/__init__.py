"""What the model registry stores."""

from models_registry.models.benchmark import Benchmark, BenchmarkPoint
from models_registry.models.configuration_search import ConfigurationSearch, SearchCandidate, SearchTrial
from models_registry.models.version import (
    EngineAllowance,
    Model,
    ModelVersion,
    SpeculationCalibration,
    Validation,
    VersionState,
)

__all__ = [
    "Benchmark",
    "BenchmarkPoint",
    "ConfigurationSearch",
    "EngineAllowance",
    "Model",
    "ModelVersion",
    "SearchCandidate",
    "SearchTrial",
    "SpeculationCalibration",
    "Validation",
    "VersionState",
]
