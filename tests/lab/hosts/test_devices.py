"""Instances of the cloud of tests have the Neuron devices of their type, as a machine's agent finds them."""

import subprocess

import pytest

from engine_agent.node.telemetry.neuron_output import parse_monitor_line, parse_neuron_ls
from engine_agent.protocol.machine_messages import Device, MachineFacts
from fleet.machines.planner import hardware_difference
from lab.hosts.devices import neuron_devices
from models_registry.instance_types.planner import INSTANCE_TYPES, NEURON

TYPES = sorted(shape.name for shape in INSTANCE_TYPES.values() if shape.vendor == NEURON)


@pytest.mark.parametrize("instance_type", TYPES)
def test_a_machine_finds_what_its_type_states(instance_type: str) -> None:
    given = neuron_devices(instance_type)
    tool = given.files["/opt/aws/neuron/bin/neuron-ls"]
    found = parse_neuron_ls(subprocess.run(["sh"], input=tool, capture_output=True, text=True, check=True).stdout)
    assert given.names == tuple(f"neuron{index}" for index in range(len(found)))
    devices = tuple(Device("neuron", each.name, each.cores, each.memory_total_bytes) for each in found)
    facts = MachineFacts("10.0.0.7", 21000, cores=8, memory_bytes=2**35, disk_free_bytes=2**38, devices=devices)
    assert hardware_difference("m-1", facts, INSTANCE_TYPES[instance_type], is_stated=True) is None


def test_the_monitor_reports_the_same_devices() -> None:
    script = neuron_devices("trn1.32xlarge").files["/opt/aws/neuron/bin/neuron-monitor"]
    [line] = [
        line for line in script.replace("echo '", "\n").replace("'; do", "\n").splitlines() if line.startswith("{")
    ]
    assert parse_monitor_line(line).device_count == 16


def test_other_machines_have_none() -> None:
    assert neuron_devices("c7i.2xlarge").names == neuron_devices("p5.48xlarge").names == ()
