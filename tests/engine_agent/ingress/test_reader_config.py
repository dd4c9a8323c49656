"""The text of a reader's configuration, whole, and what of a table it is about."""

import re
from dataclasses import replace

import msgspec
import pytest

from engine_agent.ingress.layout import lay_out
from engine_agent.ingress.reader_config import reader_structure_of, render_reader
from engine_agent.ingress.sections import HEAD_ROOM_BYTES
from engine_agent.ingress.settings import READERS, ReaderTier
from tests.engine_agent.ingress.test_config import GOLDEN, SETTINGS
from tests.engine_agent.ingress.test_layout import TABLE, with_pool

MIB = 1024 * 1024
BUFFER = re.compile(r"^  tune.bufsize (\d+)$", re.MULTILINE)


@pytest.mark.parametrize("tier", READERS, ids=lambda tier: tier.name)
def test_the_file_is_the_golden_one(tier: ReaderTier) -> None:
    assert render_reader(lay_out(TABLE), SETTINGS, tier) == (GOLDEN / f"{tier.name}.cfg").read_text()


@pytest.mark.parametrize("tier", READERS, ids=lambda tier: tier.name)
def test_only_limits_concern_a_reader(tier: ReaderTier) -> None:
    structure = reader_structure_of(lay_out(TABLE), SETTINGS, tier)
    same = [with_pool(cells=()), with_pool(models=("new",)), msgspec.structs.replace(TABLE, pools=())]
    others = [msgspec.structs.replace(TABLE, max_body_bytes=1), msgspec.structs.replace(TABLE, retry_after_s=1)]
    assert {reader_structure_of(lay_out(table), SETTINGS, tier) for table in same} == {structure}
    assert structure not in {reader_structure_of(lay_out(table), SETTINGS, tier) for table in others}
    assert reader_structure_of(lay_out(TABLE), replace(SETTINGS, replay_bytes=1), tier) != structure


def test_a_reader_has_buffers_for_its_own_bodies_and_never_for_more_than_the_table_allows() -> None:
    def bodies(max_body_bytes: int) -> list[int]:
        layout = lay_out(msgspec.structs.replace(TABLE, max_body_bytes=max_body_bytes))
        texts = [render_reader(layout, SETTINGS, tier) for tier in READERS]
        return [int(BUFFER.search(text)[1]) - HEAD_ROOM_BYTES for text in texts]  # type: ignore[index]

    assert bodies(4 * MIB) == [MIB // 4, 4 * MIB]
    assert bodies(MIB // 8) == [MIB // 8, MIB // 8]


def test_the_readers_leave_most_connections_to_those_from_outside() -> None:
    assert SETTINGS.max_connections == 4000
    assert [SETTINGS.places_at(tier) for tier in READERS] == [1000, 500]
    assert SETTINGS.max_outside_connections == 2500
