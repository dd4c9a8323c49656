"""Given to vLLM with `--worker-extension-cls`: its CPU ranks use gloo even if they share a machine, like a cell with
`SWITCHYARD_CELL_COLLECTIVES=network`. vLLM imports this module in every worker before it is built."""

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class NetworkCollectives:
    pass


CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _: False
