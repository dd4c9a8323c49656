"""Acceptable and unacceptable answers to attacks."""

import pytest

from tests.engine_agent.attacks.attacks import CHAT, Attack
from tests.engine_agent.attacks.judge import complaint

REFUSED = b"HTTP/1.1 405 Method Not Allowed\r\ncontent-length: 152\r\ncontent-type: application/json\r\n\r\n"
NEXT = b"HTTP/1.1 400 Bad request\r\nContent-Type: text/html\r\n\r\n<html>"


@pytest.mark.parametrize(("method", "is_fine"), [(b"HEAD", True), (b"POST", False)])
def test_an_answer_to_a_head_has_no_body_whatever_follows(method: bytes, is_fine: bool) -> None:
    attack = Attack("two", CHAT, (method + b" /v1/chat/completions HTTP/1.1\r\n\r\nGET",), is_framing=True)
    assert (complaint(attack, REFUSED + NEXT) is None) is is_fine
