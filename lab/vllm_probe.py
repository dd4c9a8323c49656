"""Asks vLLM itself: `python -m lab.vllm_probe QUESTIONS ANSWERS`, with the engine's Python. Reads a JSON object per
line: `parse` has options, which it parses and checks as vLLM's server does (milliseconds each, after 20 s of imports);
`load` has arguments of `vllm.LLM`, which it loads in a fork, and answers with vLLM's own figures."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODULE = "lab.vllm_probe"
ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
_SIZE = re.compile(
    r"CPU KV cache size: ([\d,]+) tokens, Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x"
)
_CONSUMED = re.compile(r"([\d.]+) GiB memory was consumed by non-kv usages")


def written_questions(questions: Iterable[Mapping[str, Any]], folder: Path) -> tuple[str, str]:
    """The arguments of this module, after writing the questions into the folder."""
    asked, answers = folder / "questions.jsonl", folder / "answers.jsonl"
    asked.write_text("".join(json.dumps(each) + "\n" for each in questions))
    return str(asked), str(answers)


def read_answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def ask_vllm(python: Path, questions: Iterable[Mapping[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Answers in a separate process. Raises RuntimeError with the end of its output if it died."""
    command = [str(python), "-m", MODULE, *written_questions(questions, folder)]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"vLLM ended with {done.returncode}: {done.stderr[-2000:]}")
    return read_answers(folder)


def _refusal(arguments: Sequence[str]) -> str:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.model_executor.models import registry
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.utils.import_utils import resolve_obj_by_qualname

    # vLLM inspects each class of models in a new process, which imports vLLM again (8 CPU seconds), so that CUDA is not
    # initialized. Parsing needs no device.
    registry._run_in_subprocess = lambda inspect: inspect()
    try:
        parsed = make_arg_parser(FlexibleArgumentParser(exit_on_error=False)).parse_args(list(arguments))
        given = AsyncEngineArgs.from_cli_args(parsed)
        if "." in str(given.distributed_executor_backend):  # as `engine_agent.engines.vllm.core_process` does
            given.distributed_executor_backend = resolve_obj_by_qualname(given.distributed_executor_backend)
        given.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except SystemExit as error:
        return f"the parser exits with {error.code}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _load(options: Mapping[str, Any], log: Path) -> dict[str, Any]:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from vllm import LLM
    from vllm.model_executor.model_loader import base_loader

    loaded = dict[int, int]()
    process = base_loader.process_weights_after_loading

    def count_and_process(model: Any, *rest: Any) -> None:
        """On a CPU, linear layers are packed afterwards into tensors that are no parameters."""
        loaded.update({each.data_ptr(): each.numel() * each.element_size() for each in model.parameters()})
        process(model, *rest)

    base_loader.process_weights_after_loading = count_and_process
    LLM(**options, skip_tokenizer_init=True, enforce_eager=True, distributed_executor_backend="uni")
    text = log.read_text(errors="replace")
    size, consumed = _SIZE.search(text), _CONSUMED.search(text)
    if size is None:
        raise RuntimeError(f"no line of the KV cache's size in {text[-2000:]}")
    return {
        "weights_bytes": sum(loaded.values()),
        "tokens": int(size[1].replace(",", "")),
        "requests": float(size[3]),
        "consumed_bytes": int(float(consumed[1]) * 2**30) if consumed else 0,
    }


def _in_a_fork(options: Mapping[str, Any], log: Path) -> dict[str, Any]:
    """A second model in one process would find the first one's memory in use."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reading)
        try:
            found = _load(options, log)
        except BaseException as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        with os.fdopen(writing, "w") as answer:
            answer.write(json.dumps(found))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "the process that loaded it died"}


def main() -> None:
    asked, answers = sys.argv[1:]
    with Path(answers).open("w") as file:
        for line in Path(asked).read_text().splitlines():
            question = json.loads(line)
            is_parse = "parse" in question
            found = (
                {"refusal": _refusal(question["parse"])}
                if is_parse
                else _in_a_fork(question["load"], Path(answers + ".log"))
            )
            file.write(json.dumps(found) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
