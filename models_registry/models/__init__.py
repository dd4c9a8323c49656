"""Tables of the model registry, and the states that versions can be in."""

from models_registry.models.model import Model
from models_registry.models.validation import Validation
from models_registry.models.version import ModelVersion
from models_registry.planning.lifecycle import VersionState

__all__ = ["Model", "ModelVersion", "Validation", "VersionState"]
