"""The machines that cells are made of, as planners see them, and the public figures of those we know.

This is the one place that says which tensor-parallel degree a machine suits. It decides nothing about a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from models_registry.planning.machine_rates import MACHINE_WATTS, ON_DEMAND


@dataclass(frozen=True, slots=True)
class InstanceShape:
    """One kind of machine.

    `cores` are the accelerator's units that take one rank each (NeuronCores, GPUs; the whole machine where it is a
    CPU), 0 where unknown. `tensor_parallel_degree` is the degree per machine that a version gets when it names
    none. `memory_gib` is the accelerators' memory, `price_per_hour` US dollars on demand in us-east-1, `watts` the
    most that the whole machine draws for long; both 0 where no list states one (`machine_rates`).
    """

    name: str
    accelerator: str
    chips: int = 0
    cores: int = 0
    memory_gib: float = 0
    price_per_hour: float = 0
    watts: float = 0
    tensor_parallel_degree: int = 1


LOCAL_CPU = "local.cpu"

_SHAPES = (
    InstanceShape(LOCAL_CPU, "cpu", cores=1, memory_gib=4),
    # https://aws.amazon.com/ec2/instance-types/trn1/: 1 or 16 Trainium chips of 2 NeuronCores and 32 GiB.
    InstanceShape("trn1.2xlarge", "trainium", 1, 2, 32, tensor_parallel_degree=2),
    InstanceShape("trn1.32xlarge", "trainium", 16, 32, 512, tensor_parallel_degree=32),
    # https://aws.amazon.com/ec2/instance-types/trn2/: 16 Trainium2 chips of 8 NeuronCores and 96 GiB. By default a rank
    # has a logical core of two (https://awsdocs-neuron.readthedocs-hosted.com, "Logical NeuronCore configuration").
    InstanceShape("trn2.48xlarge", "trainium2", 16, 64, 1536, tensor_parallel_degree=64),
    # https://aws.amazon.com/ec2/instance-types/inf2/: 12 Inferentia2 chips of 2 NeuronCores and 32 GiB.
    InstanceShape("inf2.48xlarge", "inferentia2", 12, 24, 384, tensor_parallel_degree=24),
    # https://aws.amazon.com/ec2/instance-types/p5/: 8 H100 of 80 GB.
    InstanceShape("p5.48xlarge", "h100", 8, 8, 640, tensor_parallel_degree=8),
    # The same page: 8 H200 of 141 GB.
    InstanceShape("p5en.48xlarge", "h200", 8, 8, 1128, tensor_parallel_degree=8),
    # https://aws.amazon.com/ec2/instance-types/g6/: 4 L4 of 24 GB.
    InstanceShape("g6.12xlarge", "l4", 4, 4, 96, tensor_parallel_degree=4),
    # https://aws.amazon.com/ec2/instance-types/c7i/: for ingresses. No host is taken for one by what it lacks.
    InstanceShape("c7i.2xlarge", "none", cores=1, memory_gib=16),
)

INSTANCE_TYPES: Mapping[str, InstanceShape] = MappingProxyType(
    {
        shape.name: replace(
            shape, price_per_hour=ON_DEMAND.get(shape.name, 0.0), watts=MACHINE_WATTS.get(shape.name, 0.0)
        )
        for shape in _SHAPES
    }
)
