"""Finds third-party programs for engine `generic`.

`<cache>/engines/generic/NAME/serve` is an executable that serves OpenAI's API on loopback. It is started as `serve
--model PATH --alias NAME --host 127.0.0.1 --port N --context-length N`, followed by the version's options. It must
answer `GET /v1/models` with 200 once it can serve, `POST /v1/completions` and `POST /v1/chat/completions` with `usage`,
and exit on SIGTERM."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

FOLDER = "engines/generic"
PROGRAM = "serve"
HEALTH_PATH = "/v1/models"
PREFIX = "generic/"
"""Of a program's name among the engines of a machine."""
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


def installed_programs(cache: Path) -> Mapping[str, Path]:
    """Returns `generic/NAME` -> its executable. Other files and folders are ignored."""
    found = {}
    for program in sorted((cache / FOLDER).glob(f"*/{PROGRAM}")):
        if _NAME.fullmatch(program.parent.name) and program.is_file() and os.access(program, os.X_OK):
            found[PREFIX + program.parent.name] = program
    return found
