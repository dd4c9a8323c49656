"""The code of vLLM that continuations depend on is the code that was read. After a change of vLLM, read the named
functions again, run `tests/engine_agent/engines/vllm/continuation/test_real_continuation.py`, and write the new digests
here. Nothing of vLLM is imported."""

import hashlib
import re

import pytest

from engine_agent.engines.vllm.environment import installed_python
from tests.engine_agent.engines.vllm.running_cell import CACHE

READ = {
    "logprobs.py": {"append_logprobs_for_next_position": "6ed1dc5e4d30"},
    "v1/request.py": {
        "Request.__init__": "079bcc1e8f21",
        "Request.from_engine_core_request": "039958d47519",
        "Request.append_output_token_ids": "e926584d1357",
    },
    "v1/core/sched/utils.py": {"check_stop": "5149b60c92d2"},
    "v1/core/sched/scheduler.py": {
        "Scheduler.add_request": "5c680a965a57",
        "Scheduler.schedule": "4b28ead38e40",
        "Scheduler.update_from_output": "776a0fa4ae25",
        "Scheduler._handle_blocked_waiting_request": "c4b27ba675ac",
        "Scheduler._update_request_with_output": "5e4144c47920",
    },
    "v1/core/sched/output.py": {"NewRequestData.from_request": "dc4864876bec"},
    "v1/engine/core.py": {"EngineCore.preprocess_add_request": "9e9b1851c0e3"},
    "v1/engine/async_llm.py": {
        "AsyncLLM.add_request": "55892d0fdfd0",
        "AsyncLLM._add_request": "d2405ec2f9ac",
        "AsyncLLM.generate": "0ba723e26b53",
    },
    "v1/engine/detokenizer.py": {"BaseIncrementalDetokenizer.update": "eb9d1d9ed6a8"},
    "v1/engine/output_processor.py": {
        "RequestOutputCollector.get_nowait": "c48ec8270bcd",
        "RequestState.make_request_output": "ff06222b6c84",
        "RequestState._new_completion_output": "c278c984dced",
        "OutputProcessor.abort_requests": "941e1c121c0a",
        "OutputProcessor.add_request": "f94f4ee37cde",
        "OutputProcessor.process_outputs": "33fb8cbd4841",
    },
    "v1/structured_output/__init__.py": {
        "StructuredOutputManager.grammar_init": "549d17633b24",
        "StructuredOutputManager._create_grammar": "9f3186824f9e",
        "StructuredOutputManager._get_constraint_bounds": "09a33c9fec21",
        "StructuredOutputManager.accept_tokens": "1794231046a5",
    },
    "v1/sample/ops/topk_topp_sampler.py": {"TopKTopPSampler.forward_cpu": "08013ad63ddb"},
    "v1/worker/gpu_input_batch.py": {
        "CachedRequestState.__post_init__": "a23436bd378f",
        "InputBatch.add_request": "dd8dea4025db",
    },
    "v1/worker/gpu_model_runner.py": {"GPUModelRunner._update_states": "701b94054636"},
}


def code_of(source: str, name: str) -> str:
    """The text of a function, up to the next line that is not indented further. Raises ValueError without it."""
    *kind, function = name.split(".")
    if kind:
        start = re.search(rf"^class {kind[0]}\b", source, re.MULTILINE)
        if start is None:
            raise ValueError(name)
        source = source[start.end() :]
    indent = "    " * len(kind)
    found = re.search(
        rf"^{indent}(?:async )?def {function}\(.*?\n(?=^{indent}[^\s)]|\Z)", source, re.MULTILINE | re.DOTALL
    )
    if found is None:
        raise ValueError(name)
    return found.group()


@pytest.mark.vllm
@pytest.mark.parametrize("file", READ)
def test_the_code_is_what_was_read(file: str) -> None:
    python = installed_python(CACHE)
    assert python is not None, "vLLM is not installed"
    (place,) = python.parent.parent.glob("lib/python3*/site-packages/vllm")
    source = (place / file).read_text()
    found = {name: hashlib.sha256(code_of(source, name).encode()).hexdigest()[:12] for name in READ[file]}
    assert found == READ[file]
