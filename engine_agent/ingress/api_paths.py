"""The table of paths (`engine_agent.protocol.api_surface`) as conditions of HAProxy: which requests go to cells, which
to the control plane, and what is wrong with those that go nowhere. Pure text.

`path` is what the request line says, not decoded, and compared byte by byte: so no spelling that only the next reader
would understand as one of these gets past.
"""

import re
from collections.abc import Sequence

from engine_agent.ingress.responses import NEAR_URL, UNKNOWN_URL, ErrorResponse, return_rule
from engine_agent.protocol.api_surface import API_PATHS, CELL_PATHS, AnsweredBy

IS_INFERENCE = f"acl is_inference path {' '.join(CELL_PATHS)}"
HEALTH_PATHS = ("/health", "/healthz")
MODELS_PATH = "/v1/models"
VARIABLE_PART = re.compile(r"{[a-z_]+}")
SEGMENT = "[A-Za-z0-9_-]+"
"""What stands for the variable part of a path that the control plane answers: its ids are made of these."""


def control_plane_paths() -> dict[str, tuple[str, tuple[str, ...]]]:
    """For each path that the control plane answers, a condition that is true of it alone, and its methods."""
    rows = [row for row in API_PATHS if row.answered_by is AnsweredBy.CONTROL_PLANE]
    fixed = [row.path for row in rows if not VARIABLE_PART.search(row.path)]
    return {row.path: (_condition(row.path, fixed), row.methods) for row in rows}


def _condition(path: str, fixed: Sequence[str]) -> str:
    if path in fixed:
        return f"{{ path {path} }}"
    pattern = f"^{VARIABLE_PART.sub(SEGMENT, path)}$"
    others = [other for other in fixed if re.fullmatch(pattern, other)]
    return f"{{ path -m reg {pattern} }}" + (f" !{{ path {' '.join(others)} }}" if others else "")


def with_head(methods: Sequence[str]) -> tuple[str, ...]:
    """These methods, and HEAD where GET is one of them."""
    return (*methods, "HEAD") if "GET" in methods else tuple(methods)


def wrong_method_rule(methods: Sequence[str], condition: str) -> str:
    """The rule that refuses every method but these, where the condition holds of the path."""
    message = f"%[method] is not allowed on %[path,json(utf8s)]; use {' or '.join(methods)}"
    refused = return_rule(ErrorResponse(405, "method_not_allowed", message), ("Allow", ", ".join(methods)))
    return f"{refused} if {condition} !{{ method {' '.join(with_head(methods))} }}"


def unserved_rules(*, has_control_plane: bool) -> list[str]:
    """The last of all rules, for what nobody served: the method is wrong, or there is no such path."""
    kept = control_plane_paths() if has_control_plane else {}
    return [
        *(wrong_method_rule(methods, condition) for condition, methods in kept.values()),
        wrong_method_rule(("POST",), "is_inference"),
        *_near_miss_rules(),
        return_rule(UNKNOWN_URL),
    ]


def _near_miss_rules() -> list[str]:
    """Name the path that was probably meant: ours but for letter case, slashes, a last `s`, or `/v1` twice or never."""
    known = [row.path for row in API_PATHS if not VARIABLE_PART.search(row.path)]
    return [
        "http-request set-var(txn.near) path,lower,regsub(/+,/,g),regsub(/$,),regsub(^/v1/v1/,/v1/)",
        f"acl is_near var(txn.near) -m str {' '.join(known)}",
        "http-request set-var-fmt(txn.near) /v1%[var(txn.near)] if !is_near !{ path_beg /v1/ }",
        "http-request set-var-fmt(txn.near) %[var(txn.near)]s if !is_near",
        f"{return_rule(NEAR_URL)} if is_near",
    ]
