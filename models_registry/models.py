"""Lists every table of the registry for Django; each noun declares its own."""

from models_registry.benchmarks.models import (
    Benchmark,
    BenchmarkPoint,
    ConfigurationSearch,
    SearchCandidate,
    SearchTrial,
)
from models_registry.versions.models import EngineAllowance, Model, ModelVersion, SpeculationCalibration, Validation

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
]
