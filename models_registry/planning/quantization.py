"""What a model version says of quantization. Reads and checks the field `quantization`; pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models_registry.planning.fields import FieldReader
from models_registry.planning.version_spec import InvalidVersion

NEURON_DTYPES = ("int8", "f8e4m3")
PER_CHANNEL = "per_channel_symmetric"
NEURON_SCHEMES = ("per_tensor_symmetric", PER_CHANNEL)


@dataclass(frozen=True, slots=True)
class VllmQuantization:
    """A method of vLLM's own, by its name there. Checkpoints that say how they are quantized need none."""

    method: str


@dataclass(frozen=True, slots=True)
class NeuronQuantization:
    """Weights in `dtype`, computed in the model's type.

    `checkpoints_path` is where the nodes keep the quantized weights; NxDI writes them there from the artifact's when
    it compiles. `unconverted` modules keep their type.
    """

    dtype: str
    scheme: str
    checkpoints_path: str
    unconverted: tuple[str, ...] = ()


Quantization = VllmQuantization | NeuronQuantization


def read_quantization(reference: str, engine: str, stated: Mapping[str, Any]) -> Quantization | None:
    """The quantization of a version; None where it states none.

    Raises:
        InvalidVersion: the engine has none, or a field is missing, wrong or unknown.
    """
    if not stated:
        return None
    fields = FieldReader(f"{reference}: quantization", stated)
    read: Quantization
    if engine == "vllm":
        read = VllmQuantization(fields.text("method"))
    elif engine == "neuron":
        read = _neuron(fields)
    else:
        raise InvalidVersion(f"{reference}: quantization is {dict(stated)!r}; engine {engine} has none, leave it empty")
    fields.finish()
    return read


def _neuron(fields: FieldReader) -> NeuronQuantization:
    path = fields.text("checkpoints_path")
    if not path.startswith("/"):
        raise fields.wrong("checkpoints_path", "it must be an absolute path on the nodes")
    scheme, unconverted = fields.choice("scheme", NEURON_SCHEMES, default=PER_CHANNEL), fields.texts("unconverted")
    if unconverted and scheme != PER_CHANNEL:
        raise fields.wrong("unconverted", f"with scheme {scheme} NxDI quantizes all modules; it must be empty there")
    return NeuronQuantization(fields.choice("dtype", NEURON_DTYPES), scheme, path, unconverted)
