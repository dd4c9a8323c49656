"""Reads the documents of plan drafts: YAML that was typed or uploaded, and stored documents, which an upgrade may have
made invalid."""

import json
import re
from typing import Any

import yaml

from controlplane.api.apply.access_kinds import PRIVATE
from controlplane.api.apply.documents import API_VERSION, documents_of
from controlplane.api.apply.planning import Document
from controlplane.api.apply.view import PreviewDocumentsSerializer
from controlplane.cli.documents import parse_documents
from controlplane.cli.errors import Failure
from controlplane.dashboard.wizard_checks import errors_by_path
from fleet.drafts.models import PlanDraft
from fleet.drafts.services import BYTES_MOST, Documents, merged, object_of
from kernel.decoding import decode_json
from kernel.refusals import InvalidInput

DEEPEST = 30
"""Levels of a document."""
VALUES_MOST = 20_000
"""Of a text. Reading this many takes about a second."""
ERRORS_SHOWN = 5


def read_yaml(*texts: str) -> Documents:
    """The valid documents of each text; those of a later one replace those of the same object. Raises InvalidInput with
    the line or path of what is wrong."""
    documents: Documents = []
    for text in texts:
        if len(text.encode(errors="replace")) > BYTES_MOST:
            raise wrong_yaml(f"the text is too long; the limit is {BYTES_MOST:,} bytes")
        _check_shape(text)
        try:
            written = parse_documents([("line", text)]).documents
            found = decode_json(json.dumps(written))
        except Failure as failure:
            raise wrong_yaml(re.sub(r"^line:(\d+)", r"line \1", str(failure))) from None
        except (ValueError, TypeError) as error:
            raise wrong_yaml(str(error)) from None
        documents = merged(documents, _checked(found))
    return documents


def _check_shape(text: str) -> None:
    """Refuses nesting and links before the text is read: a few links can stand for gigabytes."""
    depth = 0
    try:
        for count, event in enumerate(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))):
            line = event.start_mark.line + 1 if event.start_mark else 1
            if count > VALUES_MOST:
                raise wrong_yaml(f"line {line}: more than {VALUES_MOST:,} values")
            if isinstance(event, yaml.AliasEvent):
                raise wrong_yaml(f"line {line}: links (*{str(event.anchor)[:40]}) are not read; write the value out")
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > DEEPEST:
                raise wrong_yaml(f"line {line}: nested deeper than {DEEPEST} levels")
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise wrong_yaml(f"line {line}: {error.problem or error}") from None
    except yaml.YAMLError as error:
        raise wrong_yaml(str(error)) from None


def _checked(documents: Documents) -> Documents:
    if not documents:
        return []
    valid = PreviewDocumentsSerializer(data={"documents": documents})
    if not valid.is_valid():
        errors = [_at_its_object(documents, path, text) for path, text in errors_by_path(valid.errors)]
        hidden = f" (and {len(errors) - ERRORS_SHOWN} more)" if len(errors) > ERRORS_SHOWN else ""
        raise wrong_yaml("; ".join(errors[:ERRORS_SHOWN]) + hidden)
    private = {kind.value for kind in PRIVATE}
    if found := next((str(one["kind"]) for one in documents if one["kind"] in private), ""):
        raise wrong_yaml(
            f"a draft holds no {found}, because all operators with its link see it; use `switchyard apply`"
        )
    objects = [object_of(one) for one in documents]
    if doubled := next((one for one in objects if objects.count(one) > 1), None):
        raise wrong_yaml(f"{' '.join(doubled)} is listed twice")
    return documents


def wrong_yaml(message: str) -> InvalidInput:
    return InvalidInput(field="yaml", rule="valid", message=message)


class NoLongerValid(InvalidInput):
    """Stored documents that this release does not accept. `problems`: one sentence for each error."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(field="yaml", rule="valid", message="; ".join(problems[:ERRORS_SHOWN]))
        self.problems = problems


def stored_documents(row: PlanDraft) -> tuple[Document, ...]:
    """Raises NoLongerValid if documents are invalid by now, such as after an upgrade."""
    valid = PreviewDocumentsSerializer(data={"documents": row.documents})
    if row.documents and not valid.is_valid():
        raise NoLongerValid([_at_its_object(row.documents, path, text) for path, text in errors_by_path(valid.errors)])
    return parsed(row.documents)


def parsed(documents: Documents) -> tuple[Document, ...]:
    """Valid documents as input of planners."""
    valid = PreviewDocumentsSerializer(data={"documents": documents})
    return documents_of(valid.validated_data["documents"]) if documents and valid.is_valid() else ()


def _at_its_object(documents: Documents, path: str, text: str) -> str:
    """With the name of the object instead of its position, if it has one."""
    _, index, rest = [*path.split(".", 2), "", ""][:3]
    if not index.isdigit() or int(index) >= len(documents):
        return f"{path}: {text}" if path else text
    title = _title(documents[int(index)]) or f"document {int(index) + 1}"
    if rest == "apiVersion":
        text = f"write {API_VERSION}, the version of this release's documents"
    return f"{title}: {rest}: {text}" if rest else f"{title}: {text}"


def _title(document: Any) -> str:
    """Kind and name, "" if one is missing."""
    if not isinstance(document, dict) or not isinstance(metadata := document.get("metadata"), dict):
        return ""
    words = (document.get("kind"), metadata.get("name"))
    return " ".join(str(word)[:128] for word in words) if all(isinstance(word, str) and word for word in words) else ""
