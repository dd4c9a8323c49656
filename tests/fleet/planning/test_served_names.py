"""Which names may be served side by side, and what is said of those that may not."""

import pytest

from fleet.planning.served_names import ServedName, name_collision

DEPLOYMENT, MODEL = ServedName("chat", "chat"), ServedName("llama", "chat")
TUNED = ServedName("tuned", "chat", "llama@2")


@pytest.mark.parametrize(
    ("new", "old", "said"),
    [
        (
            ServedName("chat", "b", "m@1"),
            DEPLOYMENT,
            "adapter chat of m@1, deployment b would have the name of deploym",
        ),
        (
            ServedName("chat", "chat", "m@1"),
            DEPLOYMENT,
            "adapter chat of m@1, deployment chat would have the name of d",
        ),
        (ServedName("llama", "b", "m@1"), MODEL, "would have the name of model llama of deployment chat; each name"),
        (ServedName("tuned", "b", "m@1"), TUNED, "would have the name of adapter tuned of llama@2, deployment chat;"),
        (ServedName("tuned", "tuned"), TUNED, "deployment tuned would have the name of adapter tuned of llama@2, dep"),
        (ServedName("tuned", "b"), TUNED, "model tuned of deployment b would have the name of adapter tuned of llama@"),
    ],
)
def test_an_adapter_has_its_name_for_itself(new: ServedName, old: ServedName, said: str) -> None:
    assert said in name_collision([ServedName("fine", "b"), new], [ServedName("other", "c"), old])


def test_versions_of_one_deployment_share_adapters_and_deployments_share_models() -> None:
    assert name_collision([ServedName("tuned", "chat", "llama@3")], [TUNED, DEPLOYMENT, MODEL]) == ""
    assert name_collision([ServedName("llama", "other"), ServedName("other", "other")], [DEPLOYMENT, MODEL]) == ""
