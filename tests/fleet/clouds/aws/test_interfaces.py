"""Network interfaces: the table matches AWS's data, and the layout matches AWS's advice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.clouds.aws.launch import TABLE, Interface, instance_networks, interfaces_of
from models_registry.instance_types.planner import INSTANCE_TYPES
from tests.fleet.clouds.aws.instance_types import extract, written

WITHOUT_POOLS = ("inf1.", "local.", "p6e-")
"""The Neuron image supports no Inf1, and AWS's data in moto has no P6e."""
AWS_TYPES = [shape for shape in INSTANCE_TYPES.values() if not shape.name.startswith(WITHOUT_POOLS)]
TYPES = st.sampled_from(sorted(instance_networks()))


def test_the_table_is_the_extract() -> None:
    assert TABLE.read_text() == written(extract()), "run python -m tests.fleet.clouds.aws.instance_types"


@pytest.mark.parametrize(
    ("instance_type", "efas"),
    [
        ("trn1.2xlarge", 0), ("trn1.32xlarge", 8), ("trn1n.32xlarge", 16), ("trn2.3xlarge", 1), ("trn2.48xlarge", 16),
        ("trn2u.48xlarge", 16), ("inf2.xlarge", 0), ("inf2.48xlarge", 0), ("p5.48xlarge", 32), ("p5e.48xlarge", 32),
        ("p5en.48xlarge", 16), ("p6-b200.48xlarge", 8), ("p6-b300.48xlarge", 16), ("g6.xlarge", 0), ("g6.12xlarge", 1),
        ("g6e.48xlarge", 4), ("g5g.xlarge", 0), ("c7i.2xlarge", 0),
    ],
)  # fmt: skip
def test_as_many_efas_as_the_type_has(instance_type: str, efas: int) -> None:
    assert len([one for one in interfaces_of(instance_type) if one.kind == "efa-only"]) == efas


def test_the_table_covers_the_shipped_types_for_which_the_stack_has_images() -> None:
    known = {shape.name: len(interfaces_of(shape.name)) - 1 for shape in AWS_TYPES}
    assert known == {shape.name: shape.efa_interfaces for shape in AWS_TYPES}


def test_one_card_two_interfaces_and_a_first_card_without_efa() -> None:
    assert interfaces_of("g6.12xlarge") == (Interface(0, 0, "interface"), Interface(0, 1, "efa-only"))
    assert interfaces_of("p6-b300.48xlarge")[:3] == (
        Interface(0, 0, "interface"),
        Interface(1, 0, "efa-only"),
        Interface(2, 0, "efa-only"),
    )


@given(TYPES)
def test_a_machine_has_one_address_and_no_place_twice(instance_type: str) -> None:
    found = interfaces_of(instance_type)
    assert [one for one in found if one.kind == "interface"] == [found[0]] == [Interface(0, 0, "interface")]
    places = [(one.card, one.device) for one in found]
    assert len(set(places)) == len(places)
    assert {one.card for one in found} <= set(range(instance_networks()[instance_type].cards))
    assert {one.device for one in found if one.card} <= {0}


def test_an_unknown_type_says_where_it_belongs() -> None:
    with pytest.raises(ValueError, match=r"of trn9\.huge are not known; add it to instance_interfaces\.json"):
        interfaces_of("trn9.huge")
