"""The clients of others that are tried, each at a fixed version in an environment of its own."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Language(StrEnum):
    PYTHON = "python"
    NODE = "node"
    ENGINE = "engine"
    """In vLLM's own environment."""


@dataclass(frozen=True, slots=True)
class Client:
    """One client. `packages` with their versions; `script` below `scripts/`; `large`: hundreds of MiB to install, tried
    only if it is named."""

    name: str
    language: Language
    packages: tuple[str, ...]
    script: str
    large: bool = False


CLIENTS: Final = (
    Client("openai-python", Language.PYTHON, ("openai==3.54.0",), "openai_python.py"),
    Client("anthropic", Language.PYTHON, ("anthropic==2.10.0",), "anthropic_python.py"),
    Client("litellm", Language.PYTHON, ("litellm==1.106.0", "mcp==2.3.0"), "litellm_sdk.py"),
    Client("litellm-proxy", Language.PYTHON, ("litellm[proxy]==1.106.0",), "litellm_proxy.py"),
    Client("langchain", Language.PYTHON, ("langchain-openai==1.7.4",), "langchain_client.py"),
    Client("instructor", Language.PYTHON, ("instructor==1.17.0",), "instructor_client.py"),
    Client("llama-index", Language.PYTHON, ("llama-index-llms-openai-like==0.8.1",), "llama_index_client.py"),
    Client("locust", Language.PYTHON, ("locust==2.47.0",), "locust_client.py"),
    Client("openai-node", Language.NODE, ("openai@7.55.0",), "openai_node.mjs"),
    Client("ai-sdk", Language.NODE, ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4"), "ai_sdk.mjs"),
    Client("vllm-bench-serve", Language.ENGINE, (), "vllm_bench.py"),
    Client("aiperf", Language.PYTHON, ("aiperf==0.13.0",), "aiperf_client.py", large=True),
    Client("guidellm", Language.PYTHON, ("guidellm==0.8.1",), "guidellm_client.py", large=True),
)
