"""Routes of the model registry under `/api/v1/`: path, view set, noun."""

from models_registry.benchmarks.api import BenchmarkViewSet, ConfigurationSearchViewSet
from models_registry.versions.api.version import ModelVersionViewSet, ModelViewSet
from models_registry.versions.api.version_requests import EngineAllowanceViewSet

ROUTES = (
    ("models", ModelViewSet, "model"),
    ("model-versions", ModelVersionViewSet, "model-version"),
    ("benchmarks", BenchmarkViewSet, "benchmark"),
    ("configuration-searches", ConfigurationSearchViewSet, "configuration-search"),
    ("engine-allowances", EngineAllowanceViewSet, "engine-allowance"),
)
