"""A new version that becomes ready and fails in its bake: it goes back, having touched one cell."""

from simulator.bad_version import bad_version
from simulator.behaviour import VersionBehaviour

SCENARIO = bad_version("v2 fails 30 s after it became ready.", VersionBehaviour(fails_after_s=30.0))
