"""Compile caches on disk: which starts share one, and archives that a hostile engine or node cannot use."""

import io
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from engine_agent.engines.base import Launch
from engine_agent.engines.compile_cache import (
    BadCache,
    CompilePlace,
    compile_key,
    own_key,
    pack,
    unpack,
    with_compile_cache,
)
from engine_agent.engines.vllm.adapter import VllmAdapter
from engine_agent.node.launch import with_fingerprint
from engine_agent.protocol.engine_builds import EngineBuild, HostFacts
from engine_agent.protocol.fingerprint import fingerprint_from
from engine_agent.protocol.messages import Artifact, Assignment, EnginePlan
from engine_agent.protocol.states import CellRole
from tests.engine_agent.engines.contexts import context, peer
from tests.engine_agent.orders import assignment

WEIGHTS = Artifact("file:///models/small", "sha256:12")
PLAN = EnginePlan("vllm", "small", 4, 60.0, artifact=WEIGHTS, args=("--tensor-parallel-size", "1"))
GIVEN = assignment(plan=PLAN, peers=(peer(0), peer(1)))
STACK = {"agent": "1", "kernel": "6.1", "nvidia_driver": "580.1", "vllm.engine": "vllm 0.32.0"}
PLACE = CompilePlace(HostFacts("x86_64", {"avx512f", "avx2"}, "2.36"), 8, ("H100",), ("/cache/compiled", "/engine"))
MOST = 1024**2
SHARED = ("vllm/torch_compile_cache", "triton")


def key(given: Assignment = GIVEN, stack: dict[str, str] = STACK, place: CompilePlace = PLACE) -> str:
    launch = with_fingerprint(Launch((), {}), given.plan, stack)
    return compile_key(given, fingerprint_from(launch.env), place)


def planned(**changes: Any) -> Assignment:
    return structs.replace(GIVEN, plan=structs.replace(PLAN, **changes))


@pytest.mark.parametrize(
    "other",
    [
        lambda: key(planned(args=("--tensor-parallel-size", "2"))),
        lambda: key(planned(args=(*PLAN.args, "--max-num-seqs", "8"))),
        lambda: key(planned(env={"VLLM_CPU_OMP_THREADS_BIND": "0"})),
        lambda: key(planned(artifact=Artifact(WEIGHTS.uri, "sha256:13"))),
        lambda: key(planned(draft=Artifact(WEIGHTS.uri, "sha256:13"))),
        lambda: key(planned(build=EngineBuild("b", "sha256:14"))),
        lambda: key(structs.replace(GIVEN, rank=1)),
        lambda: key(structs.replace(GIVEN, peers=(peer(0),))),
        lambda: key(structs.replace(GIVEN, cell_role=CellRole.PREFILL)),
        lambda: key(stack={**STACK, "nvidia_driver": "580.2"}),
        lambda: key(stack={**STACK, "vllm.engine": "vllm 0.33.0"}),
        lambda: key(place=replace(PLACE, host=HostFacts("x86_64", {"avx2"}, "2.36"))),
        lambda: key(place=replace(PLACE, cores=4)),
        lambda: key(place=replace(PLACE, devices=("H200",))),
        lambda: key(place=replace(PLACE, paths=("/other/compiled", "/engine"))),
    ],
)
def test_a_cache_for_anything_else_has_another_key(other: Callable[[], str]) -> None:
    assert other() != key()


def test_cells_generations_and_kernels_share_a_key() -> None:
    assert key(structs.replace(GIVEN, cell="c-2", generation=9, secret="other")) == key()
    assert key(stack={**STACK, "kernel": "6.2"}) == key()
    assert own_key(key(), "n-1") not in (key(), own_key(key(), "n-2"))


def test_an_engine_compiles_into_the_cache_unless_its_plan_names_another_place() -> None:
    launch = VllmAdapter().launch(GIVEN, context(vllm="/engines/bin/python"))
    cached = with_compile_cache(launch, {"TRITON_CACHE_DIR": "/mine"}, Path("/c"))
    assert cached.env["VLLM_CACHE_ROOT"] == "/c/vllm"
    assert cached.env["FLASHINFER_WORKSPACE_BASE"] == "/c/flashinfer"
    assert "TRITON_CACHE_DIR" not in cached.env
    assert cached.writes[0] == Path("/c")
    assert with_compile_cache(Launch((), {}), {}, Path("/c")) == Launch((), {})


@pytest.mark.parametrize("changes", [{"args": ("--enforce-eager",)}, {"env": {"TORCH_COMPILE_DISABLE": "1"}}])
def test_an_engine_that_compiles_nothing_has_no_cache(changes: dict[str, Any]) -> None:
    assert VllmAdapter().launch(planned(**changes), context(vllm="/engines/bin/python")).compiles is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    for path in ("vllm/torch_compile_cache/a/code.so", "vllm/assets/private", "triton/k", "triton/k.lock", "other/x"):
        (made / path).parent.mkdir(parents=True, exist_ok=True)
        (made / path).write_bytes(path.encode())
    return made


def below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_shared_folders_arrive_as_they_were(folder: Path, tmp_path: Path) -> None:
    packed = pack(folder, SHARED, tmp_path / "archive", MOST)
    assert packed is not None
    assert (tmp_path / "archive").stat().st_size == packed.packed_bytes
    unpack(tmp_path / "archive", tmp_path / "there", packed.unpacked_bytes)
    assert below(tmp_path / "there") == {"vllm/torch_compile_cache/a/code.so", "triton/k"}
    assert (tmp_path / "there" / "triton" / "k").read_bytes() == b"triton/k"
    assert pack(folder, ("nothing",), tmp_path / "archive", MOST) is None
    assert pack(folder, SHARED, tmp_path / "again", MOST) == packed


def test_an_engine_cannot_have_the_agent_read_other_files_for_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"credential")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key").write_bytes(b"private")
    (folder / "triton" / "link").symlink_to(tmp_path / "secret")
    (folder / "triton" / "hard").hardlink_to(tmp_path / "secret")
    (folder / "triton" / "folder").symlink_to(tmp_path / "secrets")
    os.mkfifo(folder / "triton" / "pipe")
    packed = pack(folder, ("triton",), tmp_path / "archive", MOST)
    assert packed is not None
    unpack(tmp_path / "archive", tmp_path / "there", packed.unpacked_bytes)
    assert below(tmp_path / "there") == {"triton/k"}
    (folder / "triton").rename(tmp_path / "aside")
    (folder / "triton").symlink_to(tmp_path / "secrets")
    assert pack(folder, ("triton",), tmp_path / "archive", MOST) is None


def test_a_cache_over_the_limit_is_not_packed(folder: Path, tmp_path: Path) -> None:
    (folder / "triton" / "big").write_bytes(os.urandom(4096))
    with pytest.raises(BadCache, match="limit is 2048"):
        pack(folder, SHARED, tmp_path / "archive", 2048)


def archive_of(tmp_path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(tmp_path / "archive", "w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(bytes(member.size)))
    return tmp_path / "archive"


def member(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, linkname: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size, made.type, made.linkname = size, kind, linkname
    return made


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (member("../out", 1), "outside the destination"),
        (member("link", kind=tarfile.SYMTYPE, linkname="/etc/passwd"), "is no plain file"),
        (member("hard", kind=tarfile.LNKTYPE, linkname="fine"), "is no plain file"),
        (member("device", kind=tarfile.CHRTYPE), "is no plain file"),
        (member("big", 2000), "more than 1000 bytes"),
    ],
)
def test_an_archive_with_anything_but_small_plain_files_is_refused(
    wrong: tarfile.TarInfo, why: str, tmp_path: Path
) -> None:
    with pytest.raises(BadCache, match=why):
        unpack(archive_of(tmp_path, member("fine", 10), wrong), tmp_path / "there", 1000)
    assert not (tmp_path / "there").exists()
    assert not (tmp_path / "out").exists()


def test_something_else_than_an_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(b"no archive")
    with pytest.raises(BadCache):
        unpack(tmp_path / "archive", tmp_path / "there", 1000)
    whole = archive_of(tmp_path, member("fine", 900)).read_bytes()
    (tmp_path / "archive").write_bytes(whole[:-20])
    with pytest.raises(BadCache):
        unpack(tmp_path / "archive", tmp_path / "there", 1000)
