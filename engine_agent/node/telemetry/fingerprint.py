"""The stack fingerprint of this machine: what it has installed, and what its operator adds. Read anew at every
call, because software changes under a running agent; comparing is for `engine_agent.protocol.fingerprint`.

An operator adds fields, such as the machine image, in `fingerprint.json` in the node's home: a JSON object whose
strings are added or win over what was read, and whose nulls take a field out, so that nodes may differ in it:
`{"image": "ami-0abc", "kernel": null}`.
"""

import json
import logging
import platform
from collections.abc import Callable, Mapping
from pathlib import Path

from engine_agent.node.telemetry.stack import read_environment_stack, read_machine_stack
from engine_agent.protocol.fingerprint import FINGERPRINT_MAX_VALUE, BadFingerprint, checked_fingerprint
from engine_agent.protocol.machine_messages import release_in, version_text

log = logging.getLogger(__name__)

AGENT_VERSION = "0.1.0"
"""Version of the agent; the project's own."""
AGENT_ROOT = Path(__file__).resolve().parents[3]
"""The folder of the release, or of the checkout, that this process runs."""
OPERATOR_FILE = "fingerprint.json"
OPERATOR_FIELDS_MAX = 16
"""With what is read and what an assignment adds, a rank stays below `FINGERPRINT_MAX_FIELDS`."""

Overrides = Mapping[str, str | None]


def agent_version() -> str:
    """What this agent says it is, on each connection: its version, and its release if it is of one."""
    release = release_in(AGENT_ROOT)
    return version_text(AGENT_VERSION, release.id if release else "")


class StackFingerprint:
    """What this machine runs, on request."""

    def __init__(self, home: Path, engine_pythons: Callable[[], Mapping[str, Path]], root: Path = Path("/")) -> None:
        """Look at the operator's file once; `engine_pythons` is called for the installed engines at each reading.

        Raises:
            BadFingerprint: the file does not hold what it should.
        """
        self._file = home / OPERATOR_FILE
        self._pythons = engine_pythons
        self._root = root
        self._overrides = read_overrides(self._file)
        self._said = ""

    def read(self) -> dict[str, str]:
        """Fields of the machine, and of each engine as `<engine>.<field>`.

        An operator's file that went bad since the start is logged, and its last good content stays in force: a typing
        error must not take a serving node away from its control plane.
        """
        try:
            self._overrides, self._said = read_overrides(self._file), ""
        except BadFingerprint as error:
            if str(error) != self._said:
                log.error("%s; going on with what it last said", error)
            self._said = str(error)
        fields: dict[str, str | None] = {**read_fingerprint(self._pythons(), self._root), **self._overrides}
        return {field: value for field, value in fields.items() if value is not None}


def read_fingerprint(engine_pythons: Mapping[str, Path], root: Path = Path("/")) -> dict[str, str]:
    """The machine's own fields, and each installed engine's. The simulator runs in the agent's own Python."""
    fields = {
        "agent": AGENT_VERSION,
        **read_machine_stack(root),
        "sim.engine": f"sim {AGENT_VERSION}",
        "sim.python": platform.python_version(),
    }
    for engine, python in sorted(engine_pythons.items()):
        fields |= {f"{engine}.{field}": version for field, version in read_environment_stack(python).items()}
    return {field: value[:FINGERPRINT_MAX_VALUE] for field, value in fields.items()}


def read_overrides(path: Path) -> Overrides:
    """The operator's fields; None: take the field out. Empty where there is no file.

    Raises:
        BadFingerprint: the file does not hold what it should.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise BadFingerprint(f"{path} cannot be read: {error.strerror}") from error
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise BadFingerprint(f"{path} is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadFingerprint(f"{path} must hold a JSON object of strings and nulls, not {type(fields).__name__}")
    if len(fields) > OPERATOR_FIELDS_MAX:
        raise BadFingerprint(f"{path} has {len(fields)} fields; at most {OPERATOR_FIELDS_MAX} are allowed")
    named = {name: value for name, value in fields.items() if value is not None}
    return dict.fromkeys(fields, None) | checked_fingerprint(json.dumps(named), str(path))
