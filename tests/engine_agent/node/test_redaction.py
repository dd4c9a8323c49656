"""Credentials leave no node in a line of a log; what only looks a little like one does."""

import pytest

from engine_agent.node.log_tail import REDACTED, redacted


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("Authorization: Bearer abc.def-123456", "abc.def-123456"),
        ("headers={'authorization': 'Basic dXNlcjpwYXNz'}", "dXNlcjpwYXNz"),
        ("enrolled with sw_0a1b2c3d_s3cr3tS3cr3t", "s3cr3tS3cr3t"),
        ("OPENAI_API_KEY=sk-proj-12345678", "sk-proj-12345678"),
        ('{"api_key": "verysecret", "model": "m"}', "verysecret"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI"),
        ("using AKIAIOSFODNN7EXAMPLE for s3", "AKIAIOSFODNN7EXAMPLE"),
        ("HF_TOKEN: hf_AbCdEfGhIj", "hf_AbCdEfGhIj"),
        ("connecting to redis://user:pa55word@cache:6379/0", "pa55word"),
        ("jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0abc.c2lnbmF0dXJl", "eyJzdWIi"),
        ("password = hunter22", "hunter22"),
        ("the cell's secret is 0123456789abcdef", "0123456789abcdef"),
    ],
)
def test_secrets_are_taken_out(line: str, secret: str) -> None:
    found = redacted(line, ("0123456789abcdef",))
    assert secret not in found
    assert REDACTED in found


@pytest.mark.parametrize(
    "line",
    [
        "max_tokens=128 prompt_tokens: 4096",
        "generated 128 tokens in 3.2 s",
        "GET http://127.0.0.1:21000/health 200",
        "loaded weights sha256:0f343b0931126a20",
    ],
)
def test_harmless_lines_stay_as_they_are(line: str) -> None:
    assert redacted(line, ("",)) == line
