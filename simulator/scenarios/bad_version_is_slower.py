"""A new version that is 1.5 times slower: the gate after the canary sees it beside the others, and goes back."""

from simulator.bad_version import bad_version
from simulator.behaviour import VersionBehaviour

SCENARIO = bad_version("v2 is 1.5 times slower.", VersionBehaviour(slowness=1.5))
