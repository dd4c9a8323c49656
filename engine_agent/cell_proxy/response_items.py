"""Bounds what an engine spends on reading `input` of Responses. Pure.

vLLM compares an item with some thirty forms. One that fits is read in under 1 ms. One that fits none costs 4 to 12 ms,
because each mismatch is described, on the thread that also answers health checks: 512 of them stopped it for 6 s. So
items of the common forms pass in any number, and others in a small one.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from engine_agent.protocol.request_bodies import BadRequest

MOST_OTHERS: Final = 32
"""Items of another form than those below: 0.4 s at most."""
Status = Literal["in_progress", "completed", "incomplete"]
Nothing = Annotated[list[Any], Meta(max_length=0)]


class InputText(Struct, tag="input_text", forbid_unknown_fields=True):
    text: str


class OutputText(Struct, tag="output_text", forbid_unknown_fields=True, kw_only=True):
    text: str
    annotations: Nothing
    logprobs: Nothing = []


class SummaryText(Struct, tag="summary_text", forbid_unknown_fields=True):
    text: str


class ReasoningText(Struct, tag="reasoning_text", forbid_unknown_fields=True):
    text: str


class Said(Struct, forbid_unknown_fields=True):
    """A message as clients write it."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText]
    type: Literal["message"] = "message"


class Answered(Struct, forbid_unknown_fields=True):
    """A message as an answer had it."""

    id: str
    role: Literal["assistant"]
    content: list[OutputText]
    status: Status
    type: Literal["message"]


class Called(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str = ""
    status: Status = "completed"


class Returned(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function_call_output"]
    call_id: str
    output: str
    id: str = ""
    status: Status = "completed"


class Reasoned(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a model thought before an answer."""

    type: Literal["reasoning"]
    id: str
    summary: list[SummaryText]
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


FORMS: Final[dict[str, tuple[type[Struct], ...]]] = {
    "message": (Said, Answered),
    "function_call": (Called,),
    "function_call_output": (Returned,),
    "reasoning": (Reasoned,),
}


def check_items(items: Any, most: int) -> None:
    """Raises:
    BadRequest: there are more than `most` items, or more than `MOST_OTHERS` of another form than `FORMS`.
    """
    if not isinstance(items, list):
        return
    if len(items) > most:
        what = f"Expected an array with maximum length {most}, but got an array with length {len(items)} instead."
        raise BadRequest(f"Invalid 'input': array too long. {what}", "input", code="array_above_max_length")
    others = 0
    for at, item in enumerate(items):
        others += not has_known_form(item)
        if others > MOST_OTHERS:
            what = f"Expected at most {MOST_OTHERS} items besides {', '.join(FORMS)}, with the members of these alone."
            raise BadRequest(f"Invalid 'input[{at}]': {what}", f"input[{at}]", code="invalid_value")


def has_known_form(item: Any) -> bool:
    """Whether an engine reads the item without comparing it with many forms."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    return isinstance(kind, str) and any(_fits(item, form) for form in FORMS.get(kind, ()))


def _fits(item: Any, form: type[Struct]) -> bool:
    try:
        msgspec.convert(item, form)
    except msgspec.ValidationError:
        return False
    return True
