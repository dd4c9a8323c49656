"""Records of the entry: what a batch says, and what counts as the same."""

from traffic.planning.entry_records import EntryTargetName, Standing, is_same, records_of, swap, text_value, token_of

NAME = "llm.example.com"
TARGETS = {"a": EntryTargetName("a.elb.amazonaws.com", "Z1"), "b": EntryTargetName("b.elb.amazonaws.com", "Z1")}
TOKEN = "0123456789abcdef" * 2


def test_a_batch_deletes_what_was_read_exactly_and_creates_all_anew() -> None:
    old = {"Name": f"{NAME}.", "Type": "A", "TTL": 60, "ResourceRecords": [{"Value": "192.0.2.1"}]}
    text = {"Name": f"_switchyard.{NAME}.", "Type": "TXT", "TTL": 10, "ResourceRecords": [{"Value": '"theirs"'}]}
    changes = swap(NAME, Standing((old,), text), records_of(NAME, {"b": 1, "a": 254}, TARGETS), 8, TOKEN)
    assert [(each["Action"], each["ResourceRecordSet"]["Type"]) for each in changes] == [
        ("DELETE", "TXT"), ("DELETE", "A"), ("CREATE", "TXT"), ("CREATE", "A"), ("CREATE", "A"),
    ]  # fmt: skip
    assert changes[0]["ResourceRecordSet"] == text
    assert changes[1]["ResourceRecordSet"] == old
    assert [each["ResourceRecordSet"]["Weight"] for each in changes[3:]] == [254, 1]


def test_a_token_is_read_from_our_text_alone() -> None:
    assert token_of(text_value(12, TOKEN)) == TOKEN
    for text in ("", '"rev=12"', f"{text_value(12, TOKEN)} {text_value(12, TOKEN)}", '"switchyard rev=1 token=zz"'):
        assert token_of(text) == ""


def test_names_may_be_spelt_otherwise_and_values_may_not() -> None:
    ours = records_of(NAME, {"a": 255}, TARGETS)[0]
    read = {
        **ours,
        "Name": "LLM.example.com.",
        "AliasTarget": {**ours["AliasTarget"], "DNSName": "a.elb.amazonaws.com."},
    }
    assert is_same([ours], [read])
    assert not is_same([ours], [{**read, "Weight": 254}])
    assert not is_same([ours], [])


def test_the_fingerprint_knows_no_order() -> None:
    records = records_of(NAME, {"a": 100, "b": 155}, TARGETS)
    assert Standing(records).fingerprint == Standing(records[::-1]).fingerprint
    assert Standing(records).fingerprint != Standing(records[:1]).fingerprint
