"""The shape of every message, as `golden/vN/shapes.json` keeps it.

`python -m tests.engine_agent.protocol.shapes` writes that of the version that this code speaks: only while no release
speaks it yet; else raise `PROTOCOL_VERSION`.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from engine_agent.protocol.messages import PROTOCOL_VERSION, DownMessage, UpMessage

GOLDEN = Path(__file__).parent / "golden"
WORDS = frozenset({"description", "title"})
"""What a schema says to readers, and not to decoders."""


def folder(version: int) -> Path:
    return GOLDEN / f"v{version}"


def shapes() -> dict[str, Any]:
    (up, down), definitions = msgspec.json.schema_components((UpMessage, DownMessage))
    written = json.dumps({"up": up, "down": down, "definitions": definitions})  # numbers among keys become text
    return _without_words(json.loads(written))  # type: ignore[no-any-return]


def shapes_of(version: int) -> dict[str, Any]:
    return json.loads((folder(version) / "shapes.json").read_text())  # type: ignore[no-any-return]


def unread(writer: dict[str, Any], reader: dict[str, Any], messages: str) -> list[str]:
    """What a reader of one version cannot take of what a writer of another sends, a line each. `messages`: up or down.

    Readers pass over members that they do not know, and know a default for those that they do not require. A tag that
    they do not know costs them the message, which is why none may be sent to them; values of an enumeration likewise.
    """
    found: list[str] = []
    seen: set[tuple[str, str]] = set()

    def compare(sent: dict[str, Any], taken: dict[str, Any], where: str) -> None:
        if "$ref" in sent and "$ref" in taken:
            names = sent["$ref"].rpartition("/")[2], taken["$ref"].rpartition("/")[2]
            if names not in seen:
                seen.add(names)
                compare(writer["definitions"][names[0]], reader["definitions"][names[1]], names[1])
            return
        for name, member in taken.get("properties", {}).items():
            if name in sent.get("properties", {}):
                compare(sent["properties"][name], member, f"{where}.{name}")
            elif name in taken.get("required", ()):
                found.append(f"{where}.{name} is not sent")
        if "properties" not in taken:
            _compare_values(sent, taken, where)

    def _compare_values(sent: dict[str, Any], taken: dict[str, Any], where: str) -> None:
        for part in ("items", "additionalProperties"):
            if isinstance(sent.get(part), dict) and isinstance(taken.get(part), dict):
                compare(sent[part], taken[part], f"{where}[]")
        for part in ("anyOf", "prefixItems"):
            for one, other in zip(sent.get(part, ()), taken.get(part, ()), strict=False):
                compare(one, other, where)
        if set(sent.get("enum", ())) - set(taken.get("enum", sent.get("enum", ()))):
            found.append(f"{where} has values that are not known")
        if sent.get("type") != taken.get("type") or len(sent.get("anyOf", ())) != len(taken.get("anyOf", ())):
            found.append(f"{where} is of another type")

    taken_by_tag = _by_tag(reader, messages)
    for tag, name in _by_tag(writer, messages).items():
        if tag in taken_by_tag:
            compare({"$ref": f"#/{name}"}, {"$ref": f"#/{taken_by_tag[tag]}"}, tag)
    return found


def _by_tag(of: dict[str, Any], messages: str) -> dict[str, str]:
    mapping = of[messages]["discriminator"]["mapping"]
    return {tag: path.rpartition("/")[2] for tag, path in mapping.items()}


def _without_words(value: Any) -> Any:
    if isinstance(value, dict):
        # Among members a "description" is a member's name, and its value an object.
        kept = {key: part for key, part in value.items() if key not in WORDS or isinstance(part, dict)}
        return {key: _without_words(part) for key, part in kept.items()}
    return [_without_words(part) for part in value] if isinstance(value, list) else value


if __name__ == "__main__":
    text = json.dumps(shapes(), indent=1, sort_keys=True)
    (folder(PROTOCOL_VERSION) / "shapes.json").write_text(f"{text}\n")
