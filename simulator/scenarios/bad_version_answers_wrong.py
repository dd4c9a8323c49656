"""A new version that answers golden prompts wrong: it is never ready, touches one cell and goes back."""

from simulator.bad_version import bad_version
from simulator.behaviour import VersionBehaviour

SCENARIO = bad_version("v2 answers wrong.", VersionBehaviour(answers_wrong=True))
