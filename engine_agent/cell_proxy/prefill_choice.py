"""Decides which requests of a decode cell have their prompts read by a prefill cell, and by which. Pure: what is known
of the cells goes in, a cell or a reason comes out.

Only one answer to one prompt is handed over: of several, vLLM's decode engines have ended (CVE-2026-94623). What a
prefill cell would read otherwise than this one, or would have to read whole all the same, is not handed over either.
"""

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from engine_agent.protocol.messages import PrefillCell

PROMPT_MEMBERS = {b"/v1/completions": "prompt", b"/v1/chat/completions": "messages"}
"""Paths whose requests are handed over, and where their prompts are."""
_ONE = frozenset({b"null", b"1"})
_OFF = frozenset({b"null", b"false"})
_WITHOUT = {
    "n": _ONE,
    "best_of": _ONE,
    "prompt_embeds": _OFF,
    "prompt_logprobs": _OFF,
    "echo": _OFF,
    "tool_choice": frozenset({b"null", b'"auto"', b'"none"'}),
}
"""Members that another value makes into what is not handed over: several answers, what needs the whole prompt here, and
an answer that cannot be one token long."""
_MEDIA = (b'"image_url"', b'"video_url"', b'"input_audio"', b'"audio_url"', b'"image_embeds"')
"""In a chat: its length says nothing of its tokens."""
PROMPTS_MAX = 8
"""Of a prefill cell at once. It reads one after the other, so with more the last waits for seconds, and is sooner read
here. Where the cells keep up, few requests find so many (docs/bench/prefill_decode.md)."""
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_REMEMBERED_BYTES = 1024
_TOKEN_IDS = re.compile(rb"\[[0-9, \t\r\n]*[0-9][ \t\r\n]*\]\Z")


class Alone(StrEnum):
    """Why a decode cell reads a prompt itself, by its own rules."""

    SHORT = "short"
    CACHED = "cached"
    """All but a short rest of it was here lately."""
    UNSUPPORTED = "unsupported"
    NO_CELL = "no_cell"
    """There is no prefill cell of its layout, or none that answered lately."""
    BUSY = "busy"
    """Those that there are have as many prompts as they have at once."""
    FULL = "transfers_full"
    """As many handovers are under way as this cell may have."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prefill cell. `outstanding`: requests that it has, by this proxy's own count or by what it said last, whichever
    is more. `is_resting`: it failed a moment ago."""

    cell: PrefillCell
    outstanding: int = 0
    is_resting: bool = False


def prompt_to_hand_over(path: bytes, body: bytes) -> bytes | None:
    """The prompt of a request as it stands in JSON; None: the request is not handed over. `body` was checked
    (`rewrite.request_of`)."""
    name = PROMPT_MEMBERS.get(path)
    if name is None or not body:
        return None
    members = _members.decode(body)
    if name not in members:
        return None
    if any(bytes(members[each]) not in passed for each, passed in _WITHOUT.items() if each in members):
        return None
    prompt = bytes(members[name])
    if name == "messages":
        return None if any(kind in prompt for kind in _MEDIA) else prompt
    return prompt if prompt.startswith(b'"') or is_token_ids(prompt) else None


def is_token_ids(prompt: bytes) -> bool:
    """Whether a prompt is one list of token ids, not a list of prompts."""
    return _TOKEN_IDS.match(prompt) is not None


def choose_cell(candidates: Iterable[Candidate], kv_layout: str) -> PrefillCell | Alone:
    """The cell of this layout with the least outstanding for its size; the first by name of equal ones."""
    able = [each for each in candidates if kv_layout and each.cell.kv_layout == kv_layout and not each.is_resting]
    if not able:
        return Alone.NO_CELL
    best = min(able, key=lambda each: (each.outstanding / max(1, each.cell.max_concurrency), each.cell.cell))
    return Alone.BUSY if best.outstanding >= min(best.cell.max_concurrency, PROMPTS_MAX) else best.cell


class PromptMemory:
    """Beginnings of prompts that this cell has read lately, as hashes of pieces of their text: an estimate of what its
    engine's cache has. A tenant finds none of another's."""

    def __init__(self, most_bytes: int) -> None:
        self._most = max(1, most_bytes // _REMEMBERED_BYTES)
        self._pieces: OrderedDict[int, None] = OrderedDict()

    def known_bytes(self, tenant: str, prompt: bytes) -> int:
        """How long the beginning is that was here."""
        known = 0
        for piece in _chain(tenant, prompt):
            if piece not in self._pieces:
                break
            known += _REMEMBERED_BYTES
        return known

    def add(self, tenant: str, prompt: bytes) -> None:
        """It is here now; the end of a prompt is forgotten before its beginning."""
        for piece in reversed(_chain(tenant, prompt)):
            self._pieces[piece] = None
            self._pieces.move_to_end(piece)
        while len(self._pieces) > self._most:
            self._pieces.popitem(last=False)


def _chain(tenant: str, prompt: bytes) -> Sequence[int]:
    parent, chain = hash(tenant), []
    for at in range(0, len(prompt) - _REMEMBERED_BYTES + 1, _REMEMBERED_BYTES):
        parent = hash((parent, prompt[at : at + _REMEMBERED_BYTES]))
        chain.append(parent)
    return chain
