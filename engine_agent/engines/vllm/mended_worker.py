"""Given to vLLM with `--worker-extension-cls`: that vLLM imports this module in every process with a worker, before it
builds one, is all that the class is for. Importing it mends vLLM's proposers."""

from engine_agent.engines.vllm.speculation_mends import mend_proposers


class MendedWorker:
    pass


mend_proposers()
