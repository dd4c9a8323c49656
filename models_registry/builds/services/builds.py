"""Adds and deletes engine builds. A build is read from an allowed artifact source outside any transaction; agents check
every byte of it again."""

import hashlib
from datetime import datetime

from django.conf import settings
from django.db import IntegrityError, transaction

from engine_agent.protocol.engine_builds import (
    BUILD_FILE,
    EXTERNAL,
    MOST_FACTS_BYTES,
    BadBuild,
    BuildFacts,
    external_facts,
    parse_facts,
    part_names,
)
from engine_agent.protocol.manifest import BadArtifact
from engine_agent.protocol.messages import Artifact
from kernel import live
from kernel.events import event_record
from kernel.outside_transaction import run_outside_transaction
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from models_registry.artifacts.planner import ArtifactLimits, Place, parse_place
from models_registry.artifacts.services.sources import OpenArtifact, SourceTrouble, artifact_open
from models_registry.builds.models import FACTS, EngineBuild
from models_registry.builds.selectors import build_uses
from models_registry.builds.services.store import files_remove


def build_add(*, name: str, uri: str, actor: str, now: datetime, digest: str = "") -> EngineBuild:
    """Add the build that was packed to a folder or bucket, or that machines' images provide. An empty `digest` accepts
    what is there. Raises InvalidInput if there is no valid build. Raises Conflict if the name is taken, or the source
    does not answer."""
    if uri.startswith(EXTERNAL):
        try:
            of_image, facts = external_facts(uri)
        except BadBuild as error:
            raise InvalidInput(field="uri", rule="build", message=str(error)) from None
        if digest not in ("", of_image):
            message = f"it is {digest}; {uri} has {of_image}"
            raise InvalidInput(field="digest", rule="build", message=message)
        return build_insert(name=name, uri=uri, digest=of_image, facts=facts, actor=actor, now=now)
    found, facts = build_read(uri, digest)
    return build_insert(name=name, uri=uri, digest=found, facts=facts, actor=actor, now=now)


def build_read(uri: str, digest: str) -> tuple[str, BuildFacts]:
    """Digest and facts of the build in a folder or bucket; an empty `digest` accepts any. Raises InvalidInput if there
    is no valid build. Raises Conflict if the source does not answer."""
    sources = tuple(map(parse_place, settings.ARTIFACT_SOURCES))
    limits = ArtifactLimits(artifact_bytes=settings.ARTIFACT_MAX_GIB * 1024**3)
    try:
        opened, facts = run_outside_transaction("build", lambda: _read(Artifact(uri, digest), sources, limits))
    except (BadArtifact, BadBuild) as error:
        raise InvalidInput(field="uri", rule="build", message=str(error)) from None
    except SourceTrouble as error:
        raise Conflict(f"{error}; try again") from None
    return opened.manifest.digest, facts


def build_insert(*, name: str, uri: str, digest: str, facts: BuildFacts, actor: str, now: datetime) -> EngineBuild:
    """Add a build that was read. Raises Conflict if the name is taken."""
    columns = {field: getattr(facts, field) for field in FACTS} | {"cpu_flags": list(facts.cpu_flags)}
    try:
        with transaction.atomic():
            row = EngineBuild.objects.create(name=name, uri=uri, digest=digest, actor=actor, created_at=now, **columns)
            _record(row, "added", actor, now)
    except IntegrityError:
        raise Conflict(f"build {name} exists already; builds never change, so choose another name") from None
    return row


def build_delete(*, name: str, actor: str, now: datetime) -> None:
    """Delete a build. Files that were uploaded are deleted once no build names them; other files stay. Raises Conflict
    if a version names it."""
    with transaction.atomic():
        row = EngineBuild.objects.select_for_update().get(name=name)
        if uses := build_uses(name):
            raise Conflict(f"build {name} is named by {', '.join(uses[:5])}; retire or change these versions first")
        _record(row, "deleted", actor, now)
        row.delete()
        if not row.is_external:
            transaction.on_commit(lambda: files_remove(row.digest, row.uri))


def _read(artifact: Artifact, sources: tuple[Place, ...], limits: ArtifactLimits) -> tuple[OpenArtifact, BuildFacts]:
    opened = artifact_open(artifact, sources, limits)
    return opened, _facts(opened)


def _facts(opened: OpenArtifact) -> BuildFacts:
    """Raises BadArtifact if it has no `build.json` of the listed digest. Raises BadBuild if that is wrong, or its parts
    are others."""
    where = f"{opened.uri}/{BUILD_FILE}"
    listed = opened.manifest.files.get(BUILD_FILE)
    if listed is None:
        raise BadArtifact(f"{opened.uri} has no {BUILD_FILE}; make a build with `switchyard engine build`")
    if opened.sizes[BUILD_FILE] > MOST_FACTS_BYTES:
        raise BadBuild(f"{where} has {opened.sizes[BUILD_FILE]} bytes; the limit is {MOST_FACTS_BYTES}")
    text = b"".join(opened.source.chunks(BUILD_FILE))
    if hashlib.sha256(text).hexdigest() != listed:
        raise BadArtifact(f"{where} is corrupt: its sha256 is not {listed}")
    facts = parse_facts(text, where)
    parts = part_names(facts)
    if set(opened.sizes) != {BUILD_FILE, *parts}:
        raise BadBuild(f"{opened.uri} has other files than {BUILD_FILE} and {facts.parts} parts")
    if (there := sum(opened.sizes[part] for part in parts)) != facts.packed_bytes:
        raise BadBuild(f"{opened.uri} has {there} bytes of parts; {BUILD_FILE} says {facts.packed_bytes}")
    return facts


def _record(row: EngineBuild, what: str, actor: str, now: datetime) -> None:
    event_record(
        kind=f"engine_build.{what}",
        message=f"engine build {row.name} ({row.serves} {row.version} for {row.platform}) {what} by {actor}",
        tone=Tone.IDLE,
        now=now,
        actor=actor,
        detail={"build": row.name, "digest": row.digest, "uri": row.uri},
    )
    live.push("models", row.name)
