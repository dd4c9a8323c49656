"""Whether Neuron's configuration classes accept and refuse the same settings as we do.

On CPU, without a device.

    python -m bench neuron_configurations [--nxdi-2.28 DIR --nxd-2.28 DIR] [--nxdi-2.29 DIR --nxd-2.29 DIR]
        [--native DIR] [--write]

Each DIR is a checkout, or an unpacked archive, of sources that you fetch; none is part of this project:
neuronx-distributed-inference at the commit of 0.8.0 and of 0.9.0, neuronx-distributed at v2.28.0 and at 2.29, and the
plugin (vllm_neuron/model/neuron_config.py and vllm_neuron/utils/bucket_utils.py). Runs in the Python of vLLM's
environment, which has torch: what only a machine of Neuron has (torch_xla, nki, …) is stood in for by empty modules.

Every golden version of each target is rendered and given to the class, which must take it and keep each value. Then
each probe, a version with a setting that does not go together, must be refused by both, or taken by both. Exit status 1
if they ever differ. Some 20 s for each target. Prints Markdown; `--write` writes the page."""

import argparse
import json
import subprocess
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from bench import CACHE, PAGES, ROOT
from bench.models.neuron_classes import PLATFORMS, native_taker, nxdi_taker
from engine_agent.engines.vllm.environment import installed_python
from engine_agent.protocol.neuron_targets import NATIVE_0_24, NXDI_2_28, NXDI_2_29, TARGET_BY_NAME, NeuronTarget
from lab.versions import EXAMPLES, INF2, NOT_SERVED, TRN1, configured, example, spec
from models_registry.instance_types.planner import INSTANCE_TYPES
from models_registry.versions.planning.engine_arguments import render_version
from models_registry.versions.planning.spec import HeadCounts, InvalidVersion, VersionSpec

LIMIT_S = 300
TRN2 = INSTANCE_TYPES["trn2.48xlarge"]
MACHINES = {NXDI_2_28.name: (TRN1, INF2), NXDI_2_29.name: (TRN2,), NATIVE_0_24.name: (TRN2,)}
INT8 = {"dtype": "int8", "checkpoints_path": "/var/quantized"}
EAGLE3 = {"method": "eagle3", "tokens": 5, "draft_uri": "file:///models/draft", "draft_digest": "sha256:cd"}

NXDI_PROBES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused_qkv": {"neuron": {"fused_qkv": True}},
    "host samples": {"neuron": {"on_device_sampling_config": None}},
    "eagle3": {"speculation": EAGLE3},
    "eagle3 and batches of sizes": {"speculation": EAGLE3, "neuron": {"token_generation_batches": [4]}},
    "prefix caching": {"options": {"enable_prefix_caching": True}},
    "prefix caching and batches of sizes": {
        "options": {"enable_prefix_caching": True}, "neuron": {"token_generation_batches": [4]},
    },
    "batches of sizes": {"neuron": {"token_generation_batches": [4, 16]}},
    "a batch beyond the largest": {"neuron": {"token_generation_batches": [4, 32]}},
    "int8": {"quantization": INT8},
    "int8, whole": {"quantization": {**INT8, "unconverted": ["lm_head"]}, "neuron": {"qkv_kernel_enabled": True}},
    "int8 and a kernel of QKV": {"quantization": INT8, "neuron": {"qkv_kernel_enabled": True}},
    "fp8": {"quantization": {**INT8, "dtype": "f8e4m3"}},
    "cp 4": {"degrees": {"cp": 4}},
    "cp 4, dp 2": {"degrees": {"cp": 4, "dp": 2}, "heads": HeadCounts()},
    "cp 2, dp 4": {"degrees": {"cp": 2, "dp": 4}},
    "dp of a batch of one": {"degrees": {"dp": 2}, "max_concurrency": 1},
    "strided without cp": {"neuron": {"strided_context_parallel_kernel_enabled": True}},
    "mlp_cp without sequence parallel": {"neuron": {"mlp_cp_degree": 2}},
    "cast_type": {"neuron": {"cast_type": "other"}},
    "attention in another type": {"neuron": {"attention_dtype": "float32"}},
    "attention as declared": {"neuron": {"attention_dtype": "float32", "cast_type": "as-declared"}},
    "attention kernel of decode": {"neuron": {"attn_block_tkg_nki_kernel_enabled": True}},
    "attention kernel and QKV": {"neuron": {"attn_block_tkg_nki_kernel_enabled": True, "qkv_kernel_enabled": True}},
    "attention kernel by its old name": {"neuron": {"attn_tkg_nki_kernel_enabled": True}},
    "attention kernel, flash decoding": {
        "neuron": {"attn_tkg_builtin_kernel_enabled": True, "flash_decoding_enabled": True},
    },
    "cache update without its kernel": {"neuron": {"attn_block_tkg_nki_kernel_cache_update": True}},
    "cascaded without its kernel": {"neuron": {"attn_block_tkg_nki_kernel_cascaded_attention": True}},
    "prefill kernels by their old name": {"neuron": {"attn_block_cte_nki_kernel_enabled": True}},
    "K cache transposed": {"neuron": {"k_cache_transposed": True}},
    "K cache transposed, blocks": {
        "options": {"enable_prefix_caching": True}, "neuron": {"k_cache_transposed": True},
    },
    "rope in the QKV kernel": {"neuron": {"qkv_cte_nki_kernel_fuse_rope": True, "qkv_kernel_enabled": True}},
    "activation quantization": {"neuron": {"activation_quantization_type": "dynamic"}},
    "activation quantization, unknown": {"neuron": {"activation_quantization_type": "other"}},
    "activation quantization and a kernel": {
        "neuron": {"activation_quantization_type": "dynamic", "mlp_kernel_enabled": True},
    },
    "rmsnorm kernel alone": {"neuron": {"rmsnorm_quantize_kernel_enabled": True}},
    "shuffled": {"neuron": {"is_full_model_shuffled": True}},
    "RS_AG": {"neuron": {"ep_dispatch_cc_option": "RS_AG"}},
    "buckets": {"neuron": {"context_encoding_buckets": [512, 2048], "token_generation_buckets": [1024, 2048]}},
    "buckets beyond the context": {"neuron": {"token_generation_buckets": [4096]}},
}  # fmt: skip
NATIVE_PROBES: dict[str, dict[str, Any]] = {
    "plain": {},
    "buckets": {"neuron": {"num_seqs_buckets": [1, 16]}},
    "buckets that fall": {"neuron": {"num_seqs_buckets": [16, 1]}},
    "buckets below the largest batch": {"neuron": {"num_seqs_buckets": [1, 8]}},
    "prefill buckets": {
        "context_length": 512, "options": {"max_num_batched_tokens": 512},
        "neuron": {"num_batched_tokens_buckets": [128, 512]},
    },
    "prefill buckets, other": {
        "context_length": 1024, "options": {"max_num_batched_tokens": 1024},
        "neuron": {"num_batched_tokens_buckets": [128, 512]},
    },
    "segments": {"options": {"max_num_batched_tokens": 512}},
    "segments that the kernel has not": {"options": {"max_num_batched_tokens": 700}},
    "segments of two sizes": {"neuron": {"kv_segment_size_buckets": [512, 1024]}},
    "a long context in one piece": {"context_length": 32768, "options": {"max_num_batched_tokens": 32768}},
    "contexts of decode": {"neuron": {"decode_context_length_buckets": [512, 1024]}},
    "contexts that are no tiles": {"neuron": {"decode_context_length_buckets": [1000]}},
    "structured outputs": {"neuron": {"enable_structured_outputs": True}},
    "structured outputs, a text": {"neuron": {"enable_structured_outputs": "yes"}},
    "no expert": {"neuron": {"ep_degree": 0}},
    "shards of attention": {"neuron": {"attention_dp_size": 0}},
    "eagle3": {"speculation": EAGLE3},
}  # fmt: skip


# --- what only a machine of Neuron has ---


def goldens(target: NeuronTarget, machine: Any) -> Iterator[tuple[str, VersionSpec, dict[str, Any]]]:
    """Those that are rendered for this target on this machine, and what of it the class is given."""
    for name in (*EXAMPLES, NOT_SERVED):
        given = example(name)
        if given.machine.accelerator != machine.accelerator:
            continue
        if name == NOT_SERVED:
            yield f"golden {name}", given.spec, configured(given)
        elif (settings := rendered_settings(given.spec, given.machine, target)) is not None:
            yield f"golden {name}", given.spec, settings


def rendered_settings(version: VersionSpec, machine: Any, target: NeuronTarget) -> dict[str, Any] | None:
    """Returns the arguments of the class, or None if the version is rendered for another target. Raises InvalidVersion
    if Switchyard refuses the version."""
    rendering = render_version(version, machine)
    if not rendering.notes[-1].startswith(f"rendered for {target.name} "):
        return None
    args = list(rendering.plan.args)
    if "--additional-config" not in args:
        return {}
    found: dict[str, Any] = json.loads(args[args.index("--additional-config") + 1])[target.settings]
    return found


def probes(target: NeuronTarget, machine: Any) -> Iterator[tuple[str, VersionSpec]]:
    for name, given in (NATIVE_PROBES if target is NATIVE_0_24 else NXDI_PROBES).items():
        changes = dict(given)
        options = {"neuron_target": target.name, **changes.pop("options", {})}
        if "neuron" in changes:
            options["neuron_config"] = changes.pop("neuron")
        made = spec("neuron", machine, {"tp": 8, **changes.pop("degrees", {})}, engine_options=options)
        yield name, replace(made, **changes)


def compare(target: NeuronTarget, machine: Any, take: Callable[..., str]) -> Iterator[tuple[str, str, str, bool]]:
    for name, version, settings in goldens(target, machine):
        outcome = take(version, machine, settings)
        yield name, "rendered", outcome or "taken, each value kept", not outcome
    for name, version in probes(target, machine):
        unchecked = unchecked_settings(version, machine, target)
        outcome = take(version, machine, unchecked) if unchecked is not None else "not reached"
        try:
            render_version(version, machine)
            ours = ""
        except InvalidVersion as error:
            ours = str(error)
        agree = bool(ours) == bool(outcome) or unchecked is None
        yield name, ours or "rendered", outcome or "taken", agree


def unchecked_settings(version: VersionSpec, machine: Any, target: NeuronTarget) -> dict[str, Any] | None:
    """Returns the arguments of the class without checks, or None if they are unknown."""
    from models_registry.versions.planning import engine_arguments, neuron_configuration

    given = dict(version.engine_options.get("neuron_config", {}))
    if target is NATIVE_0_24:
        return given
    with (
        mock.patch.object(neuron_configuration, "_check_together"),
        mock.patch.object(neuron_configuration, "_check_buckets"),
        mock.patch.object(engine_arguments, "check_degrees", return_value=()),
    ):
        try:
            return rendered_settings(version, machine, target)
        except InvalidVersion:
            return None


def in_child(options: argparse.Namespace) -> int:
    warnings.simplefilter("ignore")
    target, machine = TARGET_BY_NAME[options.target], INSTANCE_TYPES[options.machine]
    folders = [Path(folder) for folder in options.folders]
    if target is NATIVE_0_24:
        take = native_taker(folders[0])
    else:
        take = nxdi_taker(folders[0], folders[1], PLATFORMS[machine.accelerator])
    for row in compare(target, machine, take):
        print("ROW " + json.dumps(row), flush=True)
    return 0


def rows_of(python: Path, target: NeuronTarget, machine: str, folders: list[Path]) -> list[tuple[str, str, str, bool]]:
    argv = [str(python), "-m", "bench.models.neuron_configurations", "--target", target.name, "--machine", machine]
    done = subprocess.run(
        [*argv, "--folders", *map(str, folders)], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    rows = [tuple(json.loads(line[4:])) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if done.returncode or not rows:
        raise SystemExit(f"{target.name} on {machine}: {done.stderr.strip()[-2000:]}")
    return rows


def main(parser: argparse.ArgumentParser) -> int:
    for name in ("nxdi-2.28", "nxd-2.28", "nxdi-2.29", "nxd-2.29", "native"):
        parser.add_argument(f"--{name}", type=Path, metavar="DIR")
    parser.add_argument("--write", action="store_true", help="write docs/bench/neuron_configurations.md")
    parser.add_argument("--target", help=argparse.SUPPRESS)
    parser.add_argument("--machine", help=argparse.SUPPRESS)
    parser.add_argument("--folders", nargs="*", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.target:
        return in_child(options)
    python = installed_python(CACHE)
    if python is None:
        raise SystemExit(f"there is no environment of vLLM in {CACHE}; make engine installs it")
    given = vars(options)
    sources = {
        NXDI_2_28.name: [given["nxdi_2.28"], given["nxd_2.28"]],
        NXDI_2_29.name: [given["nxdi_2.29"], given["nxd_2.29"]],
        NATIVE_0_24.name: [given["native"]],
    }
    lines = [
        "# What we render against Neuron's own configuration classes",
        "",
        "`python -m bench neuron_configurations`",
    ]
    lines += ["", "| target | machine | goldens taken | refused by both | taken by both | they differ |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    details, differs = [], 0
    for target, folders in ((TARGET_BY_NAME[name], folders) for name, folders in sources.items()):
        if None in folders:
            lines.append(f"| {target.name} | | its sources were not given | | | |")
            continue
        for machine in MACHINES[target.name]:
            rows = rows_of(python, target, machine.name, [folder.absolute() for folder in folders])
            golden = [row for row in rows if row[0].startswith("golden ")]
            wrong = [row for row in rows if not row[3]]
            differs += len(wrong)
            both = [row for row in rows if row[3] and row not in golden]
            refused = [row for row in both if row[1] != "rendered"]
            counts = f"{sum(row[3] for row in golden)} of {len(golden)} | {len(refused)} | {len(both) - len(refused)}"
            lines.append(f"| {target.name} | {machine.name} | {counts} | {len(wrong)} |")
            details += [
                f"- {target.name} on {machine.name}, {row[0]}: we say {row[1]}; it says {row[2]}" for row in wrong
            ]
    text = "\n".join([*lines, *(["", *details] if details else [])]) + "\n"
    print(text)
    if options.write:
        (PAGES / "neuron_configurations.md").write_text(text)
    return int(differs > 0)
