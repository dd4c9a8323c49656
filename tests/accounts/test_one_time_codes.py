"""Codes of authenticator apps: which count, when, and for whom."""

from datetime import UTC, datetime, timedelta

import pytest

from accounts import one_time_codes
from accounts.one_time_codes import matching_step

# RFC 6238, appendix B, with the last six digits: its secret in base32.
SECRET = "GEZDGNBVGY3TQOJQGEZDGNBVGY3TQOJQ"
AT = datetime.fromtimestamp(1111111109, UTC)
STEP = 1111111109 // 30


@pytest.mark.parametrize(
    ("seconds", "code"), [(59, "287082"), (1111111109, "081804"), (1234567890, "005924"), (20000000000, "353130")]
)
def test_codes_are_those_of_the_standard(seconds: int, code: str) -> None:
    assert matching_step(SECRET, code, datetime.fromtimestamp(seconds, UTC), after=0) == seconds // 30


@pytest.mark.parametrize(("off_s", "counts"), [(-60, False), (-30, True), (30, True), (60, False)])
def test_a_clock_may_be_off_by_half_a_minute(off_s: int, counts: bool) -> None:
    found = matching_step(SECRET, "081804", AT + timedelta(seconds=off_s), after=0)
    assert found == (STEP if counts else None)


def test_a_code_does_not_count_again_nor_one_before_it() -> None:
    assert matching_step(SECRET, "081804", AT, after=STEP) is None
    assert matching_step(SECRET, "081804", AT, after=STEP + 1) is None


def test_a_sealed_secret_is_one_users_and_hidden() -> None:
    text = one_time_codes.encrypted_secret(SECRET, 7, AT)
    assert SECRET not in text
    assert one_time_codes.decrypted_secret(text, 7) == SECRET
    assert one_time_codes.decrypted_secret(text, 8) == ""
    assert one_time_codes.decrypted_secret(text[:-2] + "AA", 7) == ""
    assert one_time_codes.is_recent(text, AT + timedelta(seconds=600))
    assert not one_time_codes.is_recent(text, AT + timedelta(seconds=601))


@pytest.mark.parametrize("code", ["081 804", "081-804", " 081804 "])
def test_what_people_put_between_digits_does_not_matter(code: str) -> None:
    assert one_time_codes.typed(code) == "081804"


def test_recovery_codes_differ_and_have_eighty_bits() -> None:
    codes = one_time_codes.recovery_codes()
    assert len(set(codes)) == one_time_codes.RECOVERY_CODES
    assert {len(one_time_codes.typed(code)) for code in codes} == {16}
    assert len(set(one_time_codes._LETTERS)) == 32


def test_a_qr_code_has_no_style_and_no_script() -> None:
    picture = one_time_codes.qr_code(one_time_codes.provisioning_uri(SECRET, "<b>ada", "fleet.example.com"))
    assert picture.startswith("<svg")
    assert "style=" not in picture
    assert "ada" not in picture
