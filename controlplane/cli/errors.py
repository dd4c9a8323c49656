"""Errors that end a command, each with an exit code and the lines to print."""

from typing import Any

from controlplane.cli.exit_codes import ExitCode, exit_code_of


class Failure(Exception):
    """Ends the command. `lines` follow the message; `document` replaces both with `-o json`."""

    def __init__(
        self, message: str, code: ExitCode, *, lines: tuple[str, ...] = (), document: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.lines = lines
        self.document = document or {"title": code.name.replace("_", " ").capitalize(), "detail": message}


class Problem(Failure):
    """An error response of the server, from its problem+json (RFC 9457)."""

    def __init__(self, status: int, document: dict[str, Any], places: dict[str, str] | None = None) -> None:
        self.status = status
        message = document.get("detail") or document.get("title") or f"the server answered {status}"
        super().__init__(
            str(message), exit_code_of(status), lines=problem_lines(document, places or {}), document=document
        )


def problem_lines(document: dict[str, Any], places: dict[str, str]) -> tuple[str, ...]:
    """One line for each value that breaks a rule: path, expected value, name of the rule.

    `places` maps prefixes of fields to places in files: `documents.0` -> `fleet.yaml:3`."""
    lines = []
    for error in document.get("errors") or ():
        field = str(error.get("field") or "the request")
        where = places.get(nearest(field, places), "")
        shown = f"{where}: {field}" if where else field
        lines.append(f"{shown}: {error.get('message', '')} [{error.get('rule', '')}]")
    if document.get("status") == 401:
        lines.append("`switchyard login` stores a token; for a single command use `--token` or SWITCHYARD_TOKEN.")
    return tuple(lines)


def nearest(field: str, places: dict[str, str]) -> str:
    """The longest prefix of a dotted path that has a place; "" if none has."""
    while field and field not in places:
        field = field.rpartition(".")[0]
    return field
