"""What NxDI's own class would refuse on a node is refused where a version is rendered, by the key's name.

That both agree is what `bench/models/neuron_configurations.py` finds out, against the class itself.
"""

from typing import Any

import pytest

from lab.versions import TRN1, spec
from models_registry.planning.engine_arguments import render_version
from models_registry.planning.version_spec import InvalidVersion


def render(neuron: dict[str, Any], **changes: Any) -> None:
    options = {"neuron_config": neuron, **changes.pop("options", {})}
    render_version(spec("neuron", TRN1, {"tp": 8}, engine_options=options, **changes), TRN1)


@pytest.mark.parametrize(
    ("neuron", "message"),
    [
        ({"cast_type": "other"}, r"cast_type is 'other'; it must be config or as-declared"),
        ({"attention_dtype": "float32"}, r"attention_dtype is 'float32'; another type .* needs cast_type as-declared"),
        ({"activation_quantization_type": "x"}, r"activation_quantization_type is 'x'; it must be dynamic or static"),
        (
            {"activation_quantization_type": "dynamic", "mlp_kernel_enabled": True},
            r"it goes with neither mlp_kernel_enabled nor quantized_mlp_kernel_enabled",
        ),
        ({"rmsnorm_quantize_kernel_enabled": True}, r"it needs quantized_mlp_kernel_enabled"),
        ({"qkv_cte_nki_kernel_fuse_rope": True}, r"it needs qkv_kernel_enabled and qkv_nki_kernel_enabled"),
        (
            {"attn_block_cte_nki_kernel_enabled": True},
            r"and out_proj_kernel_enabled true, and attn_kernel_enabled not f",
        ),
        ({"attn_block_tkg_nki_kernel_enabled": True}, r"it needs qkv_kernel_enabled or qkv_nki_kernel_enabled"),
        (
            {"attn_tkg_nki_kernel_enabled": True, "flash_decoding_enabled": True},
            r"attn_tkg_nki_kernel_enabled is True; it does not go with flash_decoding_enabled",
        ),
        ({"attn_block_tkg_nki_kernel_cache_update": True}, r"it needs attn_block_tkg_nki_kernel_enabled"),
        ({"k_cache_transposed": True, "flash_decoding_enabled": True}, r"it goes with neither flash_decoding_enabled"),
        ({"is_full_model_shuffled": True}, r"it needs is_mxfp4_compute or is_eagle_draft"),
        ({"token_generation_batches": [4, 32]}, r"its largest must be at most max_concurrency"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(neuron: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidVersion, match=message):
        render(neuron)


def test_int8_beside_a_kernel_of_qkv_names_what_stays_as_it_is() -> None:
    int8 = {"dtype": "int8", "checkpoints_path": "/q"}
    with pytest.raises(InvalidVersion, match=r"quantized is True; with qkv_kernel_enabled .* needs quantization.uncon"):
        render({"qkv_kernel_enabled": True}, quantization=int8)
    render({"qkv_kernel_enabled": True}, quantization={**int8, "unconverted": ["lm_head"]})


@pytest.mark.parametrize(
    "neuron",
    [
        {"attention_dtype": "float32", "cast_type": "as-declared"},
        {"attn_block_tkg_nki_kernel_enabled": True, "qkv_nki_kernel_enabled": True},
        {"attn_tkg_builtin_kernel_enabled": True},
        {"activation_quantization_type": "static"},
        {"token_generation_batches": [4, 16]},
        {"k_cache_transposed": True},
    ],
)
def test_what_goes_together_is_rendered(neuron: dict[str, Any]) -> None:
    render(neuron)
