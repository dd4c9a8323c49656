"""The records by which Route 53 brings clients to regions, and the batch that puts new ones in the place of old ones.

Pure. A batch deletes each record exactly as it was read and creates all anew, the text with the revision among them: it
changes nothing at all if anything of it is not as it was, whoever changed it.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TEXT_TTL_S = 10
RECORD_TYPE = "A"
"""An alias to a load balancer; it has a time to live of its own, 60 s."""
_TEXT = re.compile(r'"switchyard rev=([0-9]{1,15}) token=([0-9a-f]{32})"')

RecordSet = Mapping[str, Any]
"""As Route 53's API has it."""


@dataclass(frozen=True, slots=True)
class EntryTargetName:
    """A load balancer: its DNS name and the hosted zone in which that lies."""

    dns_name: str
    zone: str


@dataclass(frozen=True, slots=True)
class Standing:
    """What was read: the records of the entry's name, and the text with its revision, exactly."""

    records: tuple[RecordSet, ...] = ()
    text: RecordSet | None = None

    @property
    def value(self) -> str:
        values = (self.text or {}).get("ResourceRecords") or ()
        return " ".join(str(each["Value"]) for each in values)

    @property
    def weights(self) -> dict[str, int]:
        """Set identifier -> weight."""
        return {each["SetIdentifier"]: int(each["Weight"]) for each in self.records if "Weight" in each}

    @property
    def fingerprint(self) -> str:
        """The same for the same records, in any order."""
        whole = [sorted(json.dumps(_plain(each), sort_keys=True) for each in self.records), self.value]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]


def text_name(name: str) -> str:
    """Where the revision of an entry's records stands."""
    return f"_switchyard.{name}"


def text_value(revision: int, token: str) -> str:
    """As the text states it. `token`: 32 hexadecimal digits, of this attempt alone."""
    return f'"switchyard rev={revision} token={token}"'


def token_of(value: str) -> str:
    """The token that a text states; "" if it is none of ours."""
    match = _TEXT.fullmatch(value)
    return match.group(2) if match else ""


def records_of(name: str, weights: Mapping[str, int], targets: Mapping[str, EntryTargetName]) -> tuple[RecordSet, ...]:
    """One weighted record for each region."""
    return tuple(
        {
            "Name": name,
            "Type": RECORD_TYPE,
            "SetIdentifier": region,
            "Weight": weight,
            "AliasTarget": {
                "HostedZoneId": targets[region].zone,
                "DNSName": targets[region].dns_name,
                "EvaluateTargetHealth": True,
            },
        }
        for region, weight in sorted(weights.items())
    )


def is_same(one: Iterable[RecordSet], other: Iterable[RecordSet]) -> bool:
    """Whether records say the same, however Route 53 spells names."""
    return _sorted(one) == _sorted(other)


def swap(
    name: str, standing: Standing, records: Sequence[RecordSet], revision: int, token: str
) -> list[dict[str, Any]]:
    """The changes of the batch. Deletions come first: a name may not be weighted and unweighted in between."""
    text = {
        "Name": text_name(name),
        "Type": "TXT",
        "TTL": TEXT_TTL_S,
        "ResourceRecords": [{"Value": text_value(revision, token)}],
    }
    old = [*([standing.text] if standing.text else []), *standing.records]
    return [
        *({"Action": "DELETE", "ResourceRecordSet": dict(each)} for each in old),
        {"Action": "CREATE", "ResourceRecordSet": text},
        *({"Action": "CREATE", "ResourceRecordSet": dict(each)} for each in records),
    ]


def _sorted(records: Iterable[RecordSet]) -> list[str]:
    return sorted(json.dumps(_plain(each), sort_keys=True) for each in records)


def _plain(record: RecordSet) -> dict[str, Any]:
    plain = {key: value for key, value in record.items() if value not in (None, [], "")}
    plain["Name"] = _spelt(str(record["Name"]))
    if "Weight" in plain:
        plain["Weight"] = int(plain["Weight"])
    if "AliasTarget" in plain:
        alias = dict(plain["AliasTarget"])
        alias["DNSName"] = _spelt(alias["DNSName"])
        alias["EvaluateTargetHealth"] = str(alias.get("EvaluateTargetHealth", "")).lower() == "true"
        plain["AliasTarget"] = alias
    return plain


def _spelt(name: str) -> str:
    return name.lower().rstrip(".")
