"""The real configuration classes of Neuron's libraries, from their sources: with stand-ins for what only a machine with
devices has, they are imported and asked whether they take what is rendered. For `neuron_configurations`; the
stand-ins also for `neuron_cell`."""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from models_registry.versions.planning.spec import VersionSpec

PLATFORMS = {"trainium": "trn1", "inferentia2": "inf2", "trainium2": "trn2"}
ABSENT = (
    *("torch_xla", "torch_neuronx", "libneuronxla", "neuronxcc", "nki", "nkilib", "neuronxlogger", "lightning"),
    *("torchvision", "tenacity", "boto3", "botocore", "s3transfer", "awscrt", "transformers.utils.fx"),
)
"""Imports of the sources that a machine without devices lacks or that their configuration does not use."""


class _Anything(type):
    """A class whose every attribute is another such class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)

    def __or__(cls, other: object) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, key: object) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


def _anything(name: str) -> Any:
    def call(self: object, *given: Any, **more: Any) -> Any:
        return given[0] if given else None

    return _Anything(name, (), {"__init__": lambda self, *given, **more: None, "__call__": call})


class _Absent(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _anything(name)
        setattr(self, name, value)
        return value


class _Stands(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is absent, as empty modules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name in ABSENT or name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, module: Any) -> Any:
        made = _Absent(module.name)
        made.__path__ = []
        return made

    def exec_module(self, module: Any) -> None:
        if module.__name__ == "torch_neuronx.utils":
            module.get_platform_target = lambda: os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"]
        elif module.__name__.endswith(".collectives"):
            module.CollectivesConfig = _NoRings


class _NoRings:
    """Rings of ranks on a device, of which a process on CPU has none."""

    def __init__(self, **groups: Any) -> None:
        self.rank_src_tgt_pairs: dict[int, Any] = defaultdict(lambda: None)


# --- in a separate process for each target ---


def make_importable(nxdi: Path, nxd: Path, platform: str) -> None:
    """Have this process import NxDI and NxD from their sources, as on a machine of this platform."""
    os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] = platform
    sys.path[:0] = [str(nxdi / "src"), str(nxd / "src")]
    sys.meta_path.insert(0, _Stands())
    import torch

    torch.classes.neuron = _anything("neuron")


def nxdi_taker(nxdi: Path, nxd: Path, platform: str) -> Callable[[VersionSpec, Any, dict[str, Any]], str]:
    """Gives a configuration to NxDI's class; says why it was refused, or which value it did not keep."""
    make_importable(nxdi, nxd, platform)
    config: Any = importlib.import_module("neuronx_distributed_inference.models.config")

    def take(version: VersionSpec, machine: Any, settings: dict[str, Any]) -> str:
        del version, machine
        is_moe = bool({"moe_tp_degree", "moe_ep_degree", "blockwise_matmul_config"} & settings.keys())
        kind = config.MoENeuronConfig if is_moe else config.NeuronConfig
        try:
            made = kind(**json.loads(json.dumps(settings)))
        except (AssertionError, ValueError, KeyError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return _not_kept(made, settings)

    return take


def _not_kept(made: Any, settings: dict[str, Any]) -> str:
    for name, value in settings.items():
        kept = getattr(made, name, "(no such attribute)")
        if isinstance(value, dict) and not isinstance(kept, dict):
            kept = {key: getattr(kept, key, None) for key in value}
        if kept != value and str(kept).removeprefix("torch.") != str(value):
            return f"it keeps {kept!r} of {name}"
    return ""


def native_taker(plugin: Path) -> Callable[[VersionSpec, Any, dict[str, Any]], str]:
    """Gives a configuration to the native plugin's class and to its checks of buckets."""
    config = _module(plugin / "vllm_neuron/model/neuron_config.py")
    buckets = _module(plugin / "vllm_neuron/utils/bucket_utils.py")

    def take(version: VersionSpec, machine: Any, settings: dict[str, Any]) -> str:
        del machine
        try:
            made = config.NeuronConfig.from_dict(json.loads(json.dumps(settings)))
            if settings.get("num_seqs_buckets") is not None:
                buckets.validate_num_seqs_buckets(settings["num_seqs_buckets"], version.max_concurrency)
            if (segments := settings.get("kv_segment_size_buckets")) is not None:
                buckets.validate_kv_segment_size_buckets(segments, settings.get("num_batched_tokens_buckets"))
            if (contexts := settings.get("decode_context_length_buckets")) is not None:
                buckets.validate_decode_context_length_buckets(contexts, version.max_model_len)
            most = version.engine_options.get("max_num_batched_tokens")
            if segments is None and most is not None:
                buckets.resolve_segmented_prefill_config(most, version.max_model_len)
            if settings.get("num_batched_tokens_buckets") is not None and most is not None:
                buckets.validate_num_batched_tokens_buckets(settings["num_batched_tokens_buckets"], most)
        except (AssertionError, ValueError, KeyError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        kept = {name: value for name, value in settings.items() if name != "on_device_sampling_config"}
        return _not_kept(made, kept)

    return take


def _module(path: Path) -> Any:
    made = importlib.util.spec_from_file_location(path.stem, path)
    if made is None or made.loader is None:
        raise SystemExit(f"{path} is no module")
    module = importlib.util.module_from_spec(made)
    sys.modules[path.stem] = module  # dataclasses look their module up
    made.loader.exec_module(module)
    return module
