"""The proof on a GPU: its choice of an engine, budget, page and parts; and a whole run on CPU."""

import asyncio
import json
import socket
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import CACHE, ROOT
from bench.gpu import plane
from bench.gpu.carry import LOCK, TOOLS_LOCK, UNUSED, VLLM, _write_parts, remove_unused
from bench.gpu.load import spread
from bench.gpu.machine import VLLM_TORCH, Machine, averages, choices, parse_cards
from bench.gpu.phases import Found, Proof, Skip, page
from bench.gpu.plane import TooLate, free_ports
from engine_agent.engines.builds.pack import PackSource, pack_build
from engine_agent.protocol.engine_builds import BuildFacts, HostFacts
from engine_agent.protocol.ports import PORTS_PER_NODE

CARD = "NVIDIA H200, 580.159.03, 143771, GPU-aaaa, 700.00, 200.00, 9.0\n"
HOST = HostFacts("x86_64", {"avx2"}, "2.39", "580.159.03")
MACHINE = Machine(
    host=HOST,
    cores=16,
    system="Linux",
    python="/usr/bin/python3",
    python_version="3.12.3",
    versions={"torch": "2.11.0+cu130", "cuda": "13.0", "transformers": "5.17.0"},
    packages="/packages",
    sees_cuda=True,
    cards=parse_cards(CARD),
    why_no_card="",
    closed="",
)
NO_CARD = replace(MACHINE, cards=(), why_no_card="this machine has no nvidia-smi", sees_cuda=False)


def build(serves: str, version: str, platform: str, **more: Any) -> tuple[Path, BuildFacts]:
    stated: dict[str, Any] = {"program": "bin/python", "python": "3.12", "cpu_arch": "x86_64", "least_glibc": "2.28"}
    facts = BuildFacts(serves, version, platform, **stated, unpacked_bytes=1, packed_bytes=1, parts=1, **more)
    return Path("/builds") / serves, facts


VLLM_CUDA = build("vllm", VLLM, "cuda13.0")
LLAMA_CPU = build("llama-cpp", "2026.10", "cpu-avx2", cpu_flags=("avx2",))


def test_vllm_comes_first_on_the_torch_that_it_was_compiled_for_then_without_compilation_then_torch() -> None:
    ways = choices(MACHINE, [LLAMA_CPU, VLLM_CUDA], "cuda")
    assert [(way.engine, way.args, way.why_not) for way in ways] == [
        ("vllm", (), ""),
        ("vllm", ("--enforce-eager",), ""),
        ("llama-cpp", (), "it is for cpu-avx2"),
        ("generic", (), ""),
    ]


@pytest.mark.parametrize(
    ("machine", "device", "why"),
    [
        (MACHINE, "cpu", "it needs CUDA, and the device is cpu"),
        (NO_CARD, "cuda", "this machine has no nvidia-smi"),
        (
            replace(MACHINE, versions={"torch": "2.10.0+cu128", "cuda": "12.8"}),
            "cuda",
            f"it needs torch {VLLM_TORCH} for CUDA 13, and /usr/bin/python3 has 2.10.0+cu128 for CUDA 12.8",
        ),
        (
            replace(MACHINE, versions={}),
            "cuda",
            f"it needs torch {VLLM_TORCH} for CUDA 13, and /usr/bin/python3 has none",
        ),
        (
            replace(MACHINE, python_version="3.11.7"),
            "cuda",
            "it needs Python 3.12, and /usr/bin/python3 is 3.11.7",
        ),
        (replace(MACHINE, sees_cuda=False), "cuda", "torch of /usr/bin/python3 sees no device"),
        (
            replace(MACHINE, host=replace(HOST, glibc="2.17")),
            "cuda",
            "it needs glibc 2.28 or newer, and this host has 2.17",
        ),
    ],
)
def test_a_machine_that_cannot_run_vllm_is_told_why(machine: Machine, device: str, why: str) -> None:
    assert choices(machine, [VLLM_CUDA], device)[0].why_not == why


def test_torch_alone_serves_only_with_transformers() -> None:
    bare = replace(MACHINE, versions={"torch": "2.11.0+cu130", "cuda": "13.0"})
    assert choices(bare, [], "cuda")[-1].why_not == "/usr/bin/python3 has no transformers"
    assert choices(MACHINE, [], "cpu")[-1].why_not == ""


def test_llama_cpp_serves_on_cpu_from_its_own_weights() -> None:
    way = next(way for way in choices(NO_CARD, [LLAMA_CPU], "cpu") if way.engine == "llama-cpp")
    assert (way.why_not, way.weights) == ("", "gguf")


def test_a_list_without_a_device_is_no_card() -> None:
    assert parse_cards("No devices were found\n") == []
    assert parse_cards(CARD)[0]["driver_version"] == "580.159.03"


def test_samples_are_averaged_without_fields_that_the_driver_lacks() -> None:
    assert averages(["100.5, 1980, [N/A]", "101.5, 1000, [N/A]", "cut"]) == {"sampled_watts": 101.0, "sm_mhz": 1490.0}
    assert averages([]) == {}


# --- the budget -------------------------------------------------------------------------------------------------------


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def about() -> Found:
    return {
        "date": "2026-11-29", "command": "c", "device": "cpu", "budget_s": 480.0, "model": "m", "engine": "vllm | x",
        "machine": MACHINE.as_json(), "choices": [{"name": "vllm", "outcome": "yes"}],
    }  # fmt: skip


def run(proof: Proof, clock: Clock, phase: str, takes_s: float, end: Exception | None = None, **more: Any) -> bool:
    async def act(_: float) -> Found:
        clock.now_s += takes_s
        if end is not None:
            raise end
        return {"clients": 1}

    return asyncio.run(proof.run(phase, act, **{"limit_s": 100.0, **more}))


def test_phases_get_what_is_left_and_the_rest_is_skipped_with_the_reason(tmp_path: Path) -> None:
    clock = Clock()
    proof = Proof(480.0, tmp_path, about(), now_s=clock)
    assert run(proof, clock, "serve", 450.0, limit_s=460.0)
    assert run(proof, clock, "golden", 20.0)
    assert not run(proof, clock, "kill", 1.0, least_s=20.0)
    assert [(each.status, each.seconds, each.limit_s) for each in proof.outcomes] == [
        ("done", 450.0, 460.0),
        ("done", 20.0, 30.0),
        ("skipped", 0.0, 10.0),
    ]
    assert proof.outcomes[-1].why == "10 s of the budget are left, and it needs 20 s"


def test_a_failed_phase_ends_neither_the_run_nor_those_that_do_not_need_it(tmp_path: Path) -> None:
    clock = Clock()
    proof = Proof(480.0, tmp_path, about(), now_s=clock)
    assert not run(proof, clock, "serve", 5.0, end=ValueError("no"))
    assert not run(proof, clock, "golden", 5.0, after="serve")
    assert not run(proof, clock, "cap", 0.0, end=Skip("not requested"))
    assert run(proof, clock, "stop", 1.0)
    assert [(each.status, each.why) for each in proof.outcomes] == [
        ("failed", "ValueError: no"),
        ("skipped", "phase serve did not succeed"),
        ("skipped", "not requested"),
        ("done", ""),
    ]


def test_a_phase_that_hangs_is_cut_at_its_limit(tmp_path: Path) -> None:
    proof = Proof(480.0, tmp_path, about())

    async def hangs(_: float) -> Found:
        await asyncio.Event().wait()
        return {}

    assert not asyncio.run(proof.run("kill", hangs, limit_s=-0.99, least_s=-1.0))
    assert proof.outcomes[0].why == "not within -1 s"


def test_every_phase_leaves_the_result_on_disk(tmp_path: Path) -> None:
    clock = Clock()
    proof = Proof(480.0, tmp_path, about(), now_s=clock)
    run(proof, clock, "serve", 5.0)
    assert json.loads((tmp_path / "prove.json").read_text())["phases"][0]["status"] == "done"
    assert "| serve | done | 5.0 | clients 1 |" in (tmp_path / "prove.md").read_text()


def test_the_page_names_card_driver_date_command_and_the_figures() -> None:
    load = {"clients": 8, "requests": 3, "tokens_per_s": 12.5, "first_ms": [1.0, 2.0, 3.0], "failures": []}
    phase = {"phase": "speed", "status": "done", "seconds": 3.0, "why": "", "found": {"loads": [load], "watts": 90.0}}
    text = page({**about(), "seconds": 20.0, "phases": [phase]})
    assert "- Card: NVIDIA H200 (143771 MiB, driver 580.159.03)" in text
    assert "- Date: 2026-11-29; command: `c`" in text
    assert "| speed | done | 3.0 | watts 90.0 |" in text
    assert "| 8 | 3 | 12.5 | 2.0 (1.0, 3.0) | 0 |" in text


def test_a_cell_of_the_page_stays_in_its_table() -> None:
    phase = {"phase": "serve", "status": "failed", "seconds": 1.0, "why": "a | b\nc " + "x" * 9999, "found": {}}
    (line,) = [line for line in page({**about(), "seconds": 1.0, "phases": [phase]}).splitlines() if "| serve" in line]
    assert line.startswith("| serve | failed | 1.0 | a \\| b c xxx")
    assert len(line) < 700


def test_figures_are_least_median_and_greatest() -> None:
    assert spread([3.0, 1.0, 2.04]) == (1.0, 2.0, 3.0)
    assert spread([]) == (0.0, 0.0, 0.0)


# --- the parts --------------------------------------------------------------------------------------------------------


def test_parts_keep_to_their_size_and_make_the_folder_again(tmp_path: Path) -> None:
    source, to = tmp_path / "proof", tmp_path / "parts"
    (source / "builds").mkdir(parents=True)
    to.mkdir()
    (source / "builds" / "big").write_bytes(bytes(range(256)) * 1000)
    parts = _write_parts(source, to, 100_000)
    assert [path.name for path in parts] == ["part-00", "part-01", "part-02"]
    assert max(path.stat().st_size for path in parts) == 100_000
    whole = tmp_path / "whole.tar"
    whole.write_bytes(b"".join(path.read_bytes() for path in parts))
    with tarfile.open(whole) as tar:
        tar.extractall(tmp_path / "made", filter="data")
    assert (tmp_path / "made/builds/big").read_bytes() == (source / "builds/big").read_bytes()


def test_only_what_one_dense_model_never_loads_is_left_out(tmp_path: Path) -> None:
    for name in (
        "_C_stable_libtorch.abi3.so",
        "_moe_C_stable_libtorch.abi3.so",
        "third_party/deep_gemm/a",
    ):
        (tmp_path / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "vllm" / name).touch()
    remove_unused(tmp_path, UNUSED)
    assert [path.name for path in (tmp_path / "vllm").rglob("*") if path.is_file()] == ["_C_stable_libtorch.abi3.so"]


def test_the_locks_pin_each_wheel_by_one_hash_and_bring_no_torch() -> None:
    lines = [*LOCK.read_text().splitlines(), *TOOLS_LOCK.read_text().splitlines()]
    names = [line.partition("==")[0] for line in lines]
    assert all(line.count("--hash=sha256:") == 1 for line in lines)
    assert f"vllm=={VLLM}" in {line.partition(" ")[0] for line in lines}
    assert not {name for name in names if name.startswith(("torch", "nvidia", "triton", "flashinfer"))}


def test_a_build_for_a_machines_own_python_brings_no_interpreter(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\nexec python3 "$@"\n')
    (tmp_path / "environment/site").mkdir(parents=True)
    (tmp_path / "environment/site/one.py").write_text("1\n")
    source = PackSource(
        "vllm", VLLM, "cuda13.0", tmp_path / "environment", files={"bin/python": program}, host_python="3.12"
    )
    pack_build(source, tmp_path / "build", lambda _: None)
    facts = json.loads((tmp_path / "build/build.json").read_text())
    assert (facts["python"], facts["parts"]) == ("3.12", 1)
    with tarfile.open(tmp_path / "build/part-0000") as tar:
        assert tar.getnames() == ["bin", "bin/python", "site", "site/one.py"]


def test_nodes_get_blocks_of_ports_that_no_program_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(plane, "PORTS", range(port, port + 41))
        with pytest.raises(TooLate, match="no 40 free ports"):
            free_ports(2)
    monkeypatch.undo()
    first, second = free_ports(2)
    assert second - first == PORTS_PER_NODE


# --- a whole run ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parts' folder with llama.cpp for CPU instead of vLLM for CUDA."""
    from engine_agent.engines.builds.__main__ import pack_recipe
    from engine_agent.engines.llama_cpp import weights

    folder = tmp_path_factory.mktemp("carried")
    pack_recipe("llama-cpp", CACHE, folder / "builds" / "llama-cpp")
    assert weights.main(["build", "--cache", str(CACHE)]) == 0
    (gguf,) = (CACHE / "artifacts").glob(f"{weights.NAME}-*")
    (folder / "weights").mkdir()
    (folder / "weights" / "gguf").symlink_to(gguf)
    return folder


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ["llama-cpp", "torch"])
def test_the_whole_run_on_cpu_serves_measures_kills_and_shares(carried: Path, tmp_path: Path, engine: str) -> None:
    from engine_agent.engines.vllm.environment import install

    python = str(install(CACHE, print))  # it has torch and transformers
    argv = ["prove", "run", "--from", str(carried), "--out", str(tmp_path), "--device", "cpu", "--load-s", "1"]
    argv += ["--engine", engine, "--python", python, "--patience", "10", "--budget-s", "4000"]
    argv = [sys.executable, "-m", "bench", *argv]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False)
    result = json.loads((tmp_path / "prove.json").read_text())
    outcomes = {each["phase"]: (each["status"], each["why"]) for each in result["phases"]}
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert {phase for phase, (status, _) in outcomes.items() if status != "done"} == {"idle", "power cap"}
    assert engine in result["engine"]
    assert outcomes["power cap"][1] == "this machine has no nvidia-smi"
