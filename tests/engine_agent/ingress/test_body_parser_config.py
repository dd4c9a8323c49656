"""The text of a body parser's configuration, whole, and what of a table it is about."""

import re
from dataclasses import replace

import msgspec
import pytest

from engine_agent.ingress.body_parser_config import body_parser_structure_of, render_body_parser
from engine_agent.ingress.desired import desired_from
from engine_agent.ingress.sections import HEAD_ROOM_BYTES
from engine_agent.ingress.settings import BODY_PARSERS, BodyParserTier
from tests.engine_agent.ingress.test_config import GOLDEN, SETTINGS
from tests.engine_agent.ingress.test_desired import TABLE, with_pool

MIB = 1024 * 1024
BUFFER = re.compile(r"^  tune.bufsize (\d+)$", re.MULTILINE)


@pytest.mark.parametrize("tier", BODY_PARSERS, ids=lambda tier: tier.name)
def test_the_file_is_the_golden_one(tier: BodyParserTier) -> None:
    assert render_body_parser(desired_from(TABLE), SETTINGS, tier) == (GOLDEN / f"{tier.name}.cfg").read_text()


@pytest.mark.parametrize("tier", BODY_PARSERS, ids=lambda tier: tier.name)
def test_only_limits_concern_a_reader(tier: BodyParserTier) -> None:
    structure = body_parser_structure_of(desired_from(TABLE), SETTINGS, tier)
    same = [with_pool(cells=()), with_pool(models=("new",)), msgspec.structs.replace(TABLE, pools=())]
    # Else the HAProxy that serves would, until its parser has reloaded, miss what the parser alone can tell it.
    same += [msgspec.structs.replace(TABLE, hop_secrets=()), msgspec.structs.replace(TABLE, splits=(), keys=())]
    others = [msgspec.structs.replace(TABLE, max_body_bytes=1), msgspec.structs.replace(TABLE, retry_after_s=1)]
    assert {body_parser_structure_of(desired_from(table), SETTINGS, tier) for table in same} == {structure}
    assert structure not in {body_parser_structure_of(desired_from(table), SETTINGS, tier) for table in others}
    assert body_parser_structure_of(desired_from(TABLE), replace(SETTINGS, replay_bytes=1), tier) != structure


def test_a_body_parser_has_buffers_for_its_own_bodies_and_never_for_more_than_the_table_allows() -> None:
    def bodies(max_body_bytes: int) -> list[int]:
        desired = desired_from(msgspec.structs.replace(TABLE, max_body_bytes=max_body_bytes))
        texts = [render_body_parser(desired, SETTINGS, tier) for tier in BODY_PARSERS]
        return [int(BUFFER.search(text)[1]) - HEAD_ROOM_BYTES for text in texts]  # type: ignore[index]

    assert bodies(4 * MIB) == [MIB // 4, 4 * MIB]
    assert bodies(MIB // 8) == [MIB // 8, MIB // 8]


def test_the_body_parsers_leave_most_connections_to_those_from_outside() -> None:
    assert SETTINGS.max_connections == 4000
    assert [SETTINGS.max_requests_at(tier) for tier in BODY_PARSERS] == [1000, 500]
    assert SETTINGS.max_outside_connections == 2500
