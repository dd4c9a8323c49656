"""The patches of vLLM's proposers, on stand-ins of their shape; `test_speculation.py` runs the real ones."""

from typing import Any

from engine_agent.engines.vllm.speculation_patches import patch_medusa


class Medusa:
    def __init__(self, token_map: object) -> None:
        self.token_map = token_map

    def load_weights(self, weights: Any) -> set[str]:
        return {name for name, _ in weights if name != "token_map"}


def test_a_token_map_counts_as_loaded_where_the_model_took_it() -> None:
    class Patched(Medusa):
        pass

    patch_medusa(type("Proposer", (), {}), Patched)
    weights = [("blocks.0", 1), ("token_map", 2)]
    assert Patched(object()).load_weights(weights) == {"blocks.0", "token_map"}
    assert Patched(None).load_weights(weights) == {"blocks.0"}
