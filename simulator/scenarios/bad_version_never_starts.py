"""A new version whose engine ends while it loads: one cell is touched, the others serve on, and it goes back."""

from simulator.bad_version import bad_version
from simulator.behaviour import VersionBehaviour

SCENARIO = bad_version("v2 never starts.", VersionBehaviour(never_starts=True))
