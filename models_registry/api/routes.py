"""What the model registry shows under /api/v1/: (path, view set, noun)."""

from models_registry.api.benchmark import BenchmarkViewSet
from models_registry.api.configuration_search import ConfigurationSearchViewSet
from models_registry.api.engine_allowance import EngineAllowanceViewSet
from models_registry.api.model import ModelViewSet
from models_registry.api.version import ModelVersionViewSet

ROUTES = (
    ("models", ModelViewSet, "model"),
    ("model-versions", ModelVersionViewSet, "model-version"),
    ("benchmarks", BenchmarkViewSet, "benchmark"),
    ("configuration-searches", ConfigurationSearchViewSet, "configuration-search"),
    ("engine-allowances", EngineAllowanceViewSet, "engine-allowance"),
)
