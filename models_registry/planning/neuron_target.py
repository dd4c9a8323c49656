"""Which build of the Neuron stack a version is rendered for on a machine, and what that build refuses. Pure."""

from engine_agent.protocol.neuron_targets import DEFAULT_TARGET, TARGET_BY_NAME, TARGETS, NeuronTarget
from models_registry.planning.fields import one_of
from models_registry.planning.instance_types import InstanceShape
from models_registry.planning.parallelism import Degrees
from models_registry.planning.version_spec import InvalidVersion, VersionSpec

OPTION = "neuron_target"
"""Of a version's `engine_options`: the name of a target; left out, its machines' default."""


def target_on(spec: VersionSpec, machine: InstanceShape) -> NeuronTarget:
    """The build that cells of these machines run, of degrees that are checked: they are machines of Neuron.

    Raises:
        InvalidVersion: no such build, or one that AWS does not support there.
    """
    where = f"{spec.reference}: engine_options.{OPTION}"
    if (name := spec.engine_options.get(OPTION)) is None:
        return DEFAULT_TARGET[machine.accelerator]
    if name not in TARGET_BY_NAME:
        raise InvalidVersion(f"{where} is {name!r}; {one_of(sorted(TARGET_BY_NAME), str(name))}")
    target = TARGET_BY_NAME[name]
    if machine.accelerator not in target.accelerators:
        fitting = [each.name for each in TARGETS if machine.accelerator in each.accelerators]
        raise InvalidVersion(
            f"{where} is {name!r}; {machine.name} has {machine.accelerator}, and that target is for "
            f"{', '.join(target.accelerators)}: {' or '.join(fitting) or 'none of them'} would do"
        )
    return target


def check_target(spec: VersionSpec, degrees: Degrees, machine: InstanceShape, target: NeuronTarget) -> None:
    """Check what the build, and the machines' network, make of a cell.

    Raises:
        InvalidVersion: more nodes than it or they can join, a method of speculation or a quantization that it has not.
    """
    nodes = f"{spec.reference}: parallelism.{machine.name}.nodes is {degrees.nodes}"
    if degrees.nodes > 1 and is_without_efa(machine):
        raise InvalidVersion(
            f"{nodes}; {machine.name} has no EFA, over which the nodes of a cell reach each other's devices: it must "
            "be 1, or the machine a trn1.32xlarge, trn1n.32xlarge or of Trn2"
        )
    if target.most_nodes and degrees.nodes > target.most_nodes:
        raise InvalidVersion(
            f"{nodes}; target {target.name} puts vLLM's own executor in the place of that of a cell of several nodes, "
            f"so it must be {target.most_nodes}, or engine_options.{OPTION} nxdi-2.29"
        )
    method = spec.speculation.get("method")
    if method is not None and method != "medusa" and method not in target.speculation:
        raise InvalidVersion(
            f"{spec.reference}: speculation.method is {method!r}; target {target.name} has "
            f"{', '.join(target.speculation)}"
        )


def is_without_efa(machine: InstanceShape) -> bool:
    """Inf2, and Trn1 of a single chip: "Supported instance types" of
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html."""
    return machine.accelerator == "inferentia2" or (machine.accelerator == "trainium" and machine.chips == 1)


def target_note(target: NeuronTarget) -> str:
    """What its nodes must have installed, as a sentence."""
    return f"rendered for {target}"
