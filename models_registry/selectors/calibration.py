"""Calibrations as readers see them."""

from collections.abc import Iterable

from models_registry.models import ModelVersion, SpeculationCalibration


def latest_calibration(version: ModelVersion) -> SpeculationCalibration | None:
    """The one that counts, without the ranks that it is made of; None before the first."""
    return version.calibrations.defer("document").order_by("-id").first()


def chains_expected(versions: Iterable[int]) -> dict[int, dict[str, tuple[float, ...]]]:
    """Of versions that are calibrated: task -> tokens of a step by how many are guessed, from none on."""
    rows = SpeculationCalibration.objects.filter(version__in=versions).order_by("id").values_list("version", "figures")
    return {
        version: {str(each["name"]): tuple(map(float, each["chain"])) for each in figures} for version, figures in rows
    }
