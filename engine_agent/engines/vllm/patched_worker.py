"""Given to vLLM with `--worker-extension-cls`. vLLM imports this module in every process with a worker before it builds
one, and the import applies the patches. The class itself is empty."""

from engine_agent.engines.vllm.speculation_patches import patch_proposers


class PatchedWorker:
    pass


patch_proposers()
