"""The text of the reader's configuration, whole, and what of a table it is about."""

from dataclasses import replace

import msgspec

from engine_agent.ingress.layout import lay_out
from engine_agent.ingress.reader_config import reader_structure_of, render_reader
from tests.engine_agent.ingress.test_config import GOLDEN, SETTINGS
from tests.engine_agent.ingress.test_layout import TABLE, with_pool


def test_the_file_is_the_golden_one() -> None:
    assert render_reader(lay_out(TABLE), SETTINGS) == (GOLDEN / "reader.cfg").read_text()


def test_only_limits_concern_the_reader() -> None:
    structure = reader_structure_of(lay_out(TABLE), SETTINGS)
    same = [with_pool(cells=()), with_pool(models=("new",)), msgspec.structs.replace(TABLE, pools=())]
    others = [msgspec.structs.replace(TABLE, max_body_bytes=1), msgspec.structs.replace(TABLE, retry_after_s=1)]
    assert {reader_structure_of(lay_out(table), SETTINGS) for table in same} == {structure}
    assert structure not in {reader_structure_of(lay_out(table), SETTINGS) for table in others}
    assert reader_structure_of(lay_out(TABLE), replace(SETTINGS, replay_bytes=1)) != structure
