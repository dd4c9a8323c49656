"""vLLM's executor of one process, which measures what its decode steps take where that is known (CPU).

Given to vLLM by name with `--distributed-executor-backend`. It changes nothing of what is computed.
"""

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from engine_agent.engines.vllm.own_steps import OwnSteps, decode_sequences, runtime_folder


class OneProcessExecutor(UniProcExecutor):  # type: ignore[misc]  # the engine's libraries have no types here
    """A worker in the engine's core, and its steps' times."""

    def _init_executor(self) -> None:
        self._steps = OwnSteps(runtime_folder()) if current_platform.is_cpu() else None
        self._sequences, self._spent_s = 0, 0.0
        super()._init_executor()

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """See vLLM's. A step that will be sampled goes on in `sample_tokens`."""
        if self._steps is None:
            return super().execute_model(scheduler_output, *args, **kwargs)
        began_s = self._steps.now_s()
        output = super().execute_model(scheduler_output, *args, **kwargs)
        self._sequences, self._spent_s = decode_sequences(scheduler_output), self._steps.now_s() - began_s
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        if self._steps is None:
            return super().sample_tokens(*args, **kwargs)
        began_s = self._steps.now_s()
        output = super().sample_tokens(*args, **kwargs)
        if self._sequences:
            self._steps.note(self._sequences, self._spent_s + self._steps.now_s() - began_s)
        self._sequences = 0
        return output
