"""The launcher refuses clearly and prepares what a node must."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_agent.engines.artifacts import describe_folder, entry_of, write_manifest
from engine_agent.engines.vllm.cell.member import member_from
from engine_agent.engines.vllm.class_scheduler import TOKENS_VARIABLE
from engine_agent.engines.vllm.options import ServeOptions, parse
from engine_agent.engines.vllm.serve import (
    CELL_EXECUTOR,
    CLASS_SCHEDULER,
    EXIT_NO_VLLM,
    ONE_PROCESS_EXECUTOR,
    OWN_SERVER,
    CannotServe,
    Server,
    cache_argv,
    check_artifact,
    check_shared_memory,
    fresh_runtime_folder,
    node_environment,
    own_store,
    reserve_port,
    scheduler_argv,
    speculation_argv,
    vllm_argv,
)
from tests import ports

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[4]
NODE_ID = "n-000test1"
LIMIT_S = 120.0


def command_line(port: int, model_dir: Path, digest: str, *more: str) -> list[str]:
    return [
        *("--node-id", NODE_ID, "--cell", "c-1", "--generation", "1", "--rank", "0", "--role", "leader"),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model", "smollm2"),
        *("--model-dir", str(model_dir), "--digest", digest),
        *more,
    ]


def launched(arguments: list[str], **environment: str) -> "subprocess.CompletedProcess[str]":
    """The launcher's end in a Python without vLLM, which is the one that runs the tests."""
    return subprocess.run(
        [sys.executable, "-m", "engine_agent.engines.vllm.serve", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture
def artifact(tmp_path: Path) -> tuple[Path, str]:
    (tmp_path / "weights").write_bytes(b"1")
    manifest = describe_folder(tmp_path, {})
    write_manifest(tmp_path, manifest)
    return tmp_path, manifest.digest


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def free_port() -> int:
    return ports.free_port()


@pytest.fixture
def runtime() -> Iterator[Path]:
    folder = fresh_runtime_folder(NODE_ID)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def options(*vllm_args: str, host: str = "127.0.0.1", followers: int = 0) -> ServeOptions:
    return ServeOptions(
        NODE_ID, host, 34003, "smollm2", Path("/model"), "sha256:00", vllm_args, "c-1", 1, followers=followers
    )


def test_what_follows_the_dashes_is_vllms() -> None:
    parsed = parse(command_line(34003, Path("/model"), "sha256:00", "--", "--port", "1", "--", "x"))
    assert parsed == options("--port", "1", "--", "x")


@pytest.mark.parametrize(
    "wrong",
    [
        ("--rank", "1"),
        ("--role", "follower"),
        ("--generation", "x"),
        ("--max-model", "1"),
        ("--followers", "1"),
        ("--followers", "1", "--leader", "25000"),
    ],
)
def test_what_it_cannot_do_is_a_bad_command_line(wrong: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([*command_line(34003, Path("/model"), "sha256:00"), *wrong])
    assert ended.value.code == 2


def test_the_plans_options_come_last() -> None:
    argv = vllm_argv(options("--max-model-len", "2048"))
    assert argv[:4] == ["--model", "/model", "--served-model-name", "smollm2"]
    assert argv[-2:] == ["--max-model-len", "2048"]


def test_adapters_are_named_with_their_paths_and_their_model() -> None:
    more = ("--adapter", "acme/tuned", "/cache/a,b=c", "sha256:11", "--adapter", "other", "/cache/o", "sha256:22")
    argv = vllm_argv(parse(command_line(34003, Path("/model"), "sha256:00", *more, "--", "--max-loras", "2")))
    at = argv.index("--lora-modules")
    assert [json.loads(module) for module in argv[at + 1 : at + 3]] == [
        {"name": "acme/tuned", "path": "/cache/a,b=c", "base_model_name": "smollm2"},
        {"name": "other", "path": "/cache/o", "base_model_name": "smollm2"},
    ]
    assert argv[at + 3 :] == ["--max-loras", "2"]
    assert "--lora-modules" not in vllm_argv(options())


@pytest.mark.parametrize(
    ("stated", "tokens"),
    [
        ((), 0),
        (("--scheduling-policy", "fcfs"), 0),
        (("--scheduling-policy", "priority"), 256),
        (("--batch-prompt-tokens", "32", "--scheduling-policy", "priority"), 32),
        (("--batch-prompt-tokens", "0", "--scheduling-policy", "priority"), 0),
    ],
)
def test_classes_have_an_order_where_vllm_schedules_by_priority(stated: tuple[str, ...], tokens: int) -> None:
    read = parse(command_line(34003, Path("/model"), "sha256:00", "--", *stated, "--seed", "1"))
    assert read.batch_prompt_tokens == tokens
    assert "--batch-prompt-tokens" not in read.vllm_args
    assert read.vllm_args[-2:] == ("--seed", "1")
    wanted = ("--scheduler-cls", CLASS_SCHEDULER) if tokens else ()
    assert scheduler_argv(read, OWN_SERVER) == wanted
    assert scheduler_argv(read, Server((), OWN_SERVER.run)) == ()
    given = node_environment(read, Path("/run"), 2, {}).get(TOKENS_VARIABLE)
    assert given == (str(tokens) if tokens else None)


def test_an_adapter_that_is_another_than_its_digest_says_is_not_loaded(
    artifact: tuple[Path, str], free_port: int
) -> None:
    folder, digest = artifact
    ended = launched([*command_line(free_port, folder, digest), "--adapter", "tuned", str(folder), "sha256:00"])
    assert ended.returncode == 4
    assert f"will not load {folder}" in ended.stderr


def test_the_api_listens_on_loopback_whatever_the_nodes_address_is() -> None:
    argv = vllm_argv(options(host="10.0.0.1"))
    assert argv[argv.index("--host") + 1] == "127.0.0.1"
    assert "10.0.0.1" not in argv


def test_one_library_compiles_the_schemas_of_all_requests() -> None:
    argv = vllm_argv(options())
    assert json.loads(argv[argv.index("--structured-outputs-config") + 1]) == {"backend": "xgrammar"}


def test_the_worker_runs_in_the_engines_core() -> None:
    argv = vllm_argv(options())
    assert argv[argv.index("--distributed-executor-backend") + 1] == ONE_PROCESS_EXECUTOR


@pytest.mark.parametrize(
    "chosen", [("--distributed-executor-backend", "mp"), ("--tensor_parallel_size=2",), ("-tp", "2"), ("-pp", "2")]
)
def test_a_plan_that_places_workers_is_left_alone(chosen: tuple[str, ...]) -> None:
    assert ONE_PROCESS_EXECUTOR not in vllm_argv(options(*chosen))


def test_a_cell_of_several_nodes_gets_its_executor_whatever_its_degrees() -> None:
    argv = vllm_argv(options("--tensor-parallel-size", "2", followers=1))
    assert argv[argv.index("--distributed-executor-backend") + 1] == CELL_EXECUTOR


@pytest.mark.parametrize(
    ("stated", "followers", "workers"),
    [
        ((), 0, 1),
        (("--tensor-parallel-size", "8"), 0, 8),
        (("--tensor-parallel-size", "4"), 1, 2),
        (("--tensor-parallel-size", "2", "--pipeline-parallel-size", "3"), 2, 2),
        (("--tensor-parallel-size", "two"), 0, 1),
    ],
)
def test_the_workers_of_a_node_share_its_cores(stated: tuple[str, ...], followers: int, workers: int) -> None:
    read = options(*stated, followers=followers)
    assert read.workers == workers
    assert node_environment(read, Path("/run"), 17, {})["OMP_NUM_THREADS"] == str(16 // workers)
    assert replace(read, one_worker=True).workers == 1


def test_workers_whose_queues_find_no_room_are_refused_before_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    read = options("--tensor-parallel-size", "4")
    needed = 24 + 160 + 4 * 240

    def of_mib(free: int) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=free << 8, f_frsize=4096)

    of_a_cell = options("--tensor-parallel-size", "4", followers=1)
    monkeypatch.setattr(os, "statvfs", lambda _: of_mib(64))
    with pytest.raises(CannotServe, match=f"/shm has 64 MiB free.* 4 workers need {needed} MiB.*--shm-size={needed}m"):
        check_shared_memory(read, Path("/shm"))
    check_shared_memory(options(), Path("/shm"))
    check_shared_memory(of_a_cell, Path("/shm"))
    monkeypatch.setattr(os, "statvfs", lambda _: of_mib(needed))
    check_shared_memory(read, Path("/shm"))
    monkeypatch.setattr(os, "statvfs", lambda _: of_mib(23))
    with pytest.raises(CannotServe, match="2 workers need 24 MiB"):
        check_shared_memory(of_a_cell, Path("/shm"))
    with pytest.raises(CannotServe, match="kv_offloading_size needs 1024 MiB"):
        check_shared_memory(stored(), Path("/shm"))
    with pytest.raises(CannotServe, match=r"4 workers need 1144 MiB and kv_offloading_size needs 512 MiB.*-size=1656m"):
        check_shared_memory(stored("--kv-offloading-size", "0.5", "--tensor-parallel-size", "4"), Path("/shm"))


def stored(*vllm_args: str) -> ServeOptions:
    line = command_line(8000, Path("/m"), "sha256:1", "--kv-store", "/cache/kv", "--", "--kv-store-size", "20")
    return parse([*line, *vllm_args])


def test_a_store_of_kv_blocks_is_vllms_connector() -> None:
    argv = vllm_argv(stored("--kv-offloading-size", "2", "--kv-offloading-backend", "native", "--seed", "1"))
    assert argv[-2:] == ["--seed", "1"]
    assert not [word for word in argv if word.startswith(("--kv-store", "--kv-offload"))]
    stated = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    assert (stated["kv_connector"], stated["kv_load_failure_policy"]) == ("OffloadingConnector", "recompute")
    extra = stated["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == 2 * 1024**3
    [tier] = extra["secondary_tiers"]
    assert (tier["folder"], tier["limit_bytes"]) == ("/cache/kv", 20 * 1024**3)
    assert Path(tier["root_dir"]).parent == Path("/cache/kv")


def test_a_vllm_without_a_store_says_so(tmp_path: Path, artifact: tuple[Path, str]) -> None:
    folder, digest = artifact
    line = command_line(ports.free_ports(1), folder, digest, "--kv-store", str(tmp_path / "kv"))
    ended = launched([*line, "--", "--kv-store-size", "1"])
    assert ended.returncode == EXIT_NO_VLLM
    assert "has no store of KV blocks in files: leave kv_store_size out" in ended.stderr


def test_a_store_is_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_store(tmp_path / "cache" / "kv")
    assert (tmp_path / "cache" / "kv").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    own_store(tmp_path / "open")
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(CannotServe, match=r"cannot use .*/file for KV blocks: File exists"):
        own_store(tmp_path / "file")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(CannotServe, match="/open, for KV blocks, is a folder of another user; remove it"):
        own_store(tmp_path / "open")


def test_a_member_knows_its_place_from_its_environment() -> None:
    wanted = node_environment(options(followers=1), Path("/run"), 2, {})
    assert member_from(wanted) == options(followers=1).member(Path("/run"))


def test_eager_means_that_nothing_is_compiled() -> None:
    assert node_environment(options("--enforce-eager"), Path("/run"), 2, {})["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in node_environment(options(), Path("/run"), 2, {})


def test_a_core_is_left_free_and_the_plan_wins() -> None:
    wanted = node_environment(options(), Path("/run"), 8, {"VLLM_CPU_OMP_THREADS_BIND": "0-3", "TMPDIR": "/tmp"})
    assert wanted["OMP_NUM_THREADS"] == "7"
    assert wanted["TMPDIR"] == "/run"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in wanted
    assert node_environment(options(), Path("/run"), 1, {})["OMP_NUM_THREADS"] == "1"


def test_collectives_are_tied_to_the_interface_of_the_nodes_address() -> None:
    assert node_environment(options(), Path("/run"), 2, {})["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in node_environment(options(host="192.0.2.1"), Path("/run"), 2, {})


def test_processes_carry_the_nodes_id_in_their_titles() -> None:
    assert NODE_ID in node_environment(options("--enforce-eager"), Path("/run"), 2, {})["VLLM_PROCESS_NAME_PREFIX"]


def test_nothing_that_names_the_node_is_part_of_the_keys_of_compiled_code() -> None:
    one, two = (
        {name: value for name, value in node_environment(each, Path("/run"), 2, {}).items() if name.startswith("VLLM_")}
        for each in (options(), replace(options(), node_id="n-2", cell="c-2", port=35000))
    )
    assert one == two


def test_what_a_killed_engine_left_is_removed(runtime: Path) -> None:
    (runtime / "socket").touch()
    assert fresh_runtime_folder(NODE_ID) == runtime
    assert list(runtime.iterdir()) == []
    assert runtime.stat().st_mode & 0o777 == 0o700


def test_a_link_in_place_of_the_runtime_folder_is_refused(runtime: Path, tmp_path: Path) -> None:
    runtime.rmdir()
    runtime.symlink_to(tmp_path)
    try:
        with pytest.raises(CannotServe, match="is in the way"):
            fresh_runtime_folder(NODE_ID)
    finally:
        runtime.unlink()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(CannotServe, match=r"cannot listen on 192\.0\.2\.1:34003"):
        reserve_port("192.0.2.1", 34003)


def test_a_held_address_is_free_for_the_server_alone(free_port: int) -> None:
    with reserve_port("127.0.0.1", free_port), socket.socket() as other, socket.socket() as server:
        with pytest.raises(OSError, match="Address already in use"):
            other.bind(("127.0.0.1", free_port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", free_port))
        server.listen()
        with socket.create_connection(("127.0.0.1", free_port), timeout=LIMIT_S):
            pass


def test_a_taken_port_ends_it_with_status_5(taken_port: int, artifact: tuple[Path, str]) -> None:
    ended = launched(command_line(taken_port, *artifact))
    assert ended.returncode == 5
    assert ended.stderr == f"node {NODE_ID}: cannot listen on 127.0.0.1:{taken_port}: Address already in use\n"


def test_a_corrupt_artifact_of_a_cache_is_for_the_next_start_to_repair(tmp_path: Path) -> None:
    entry = entry_of(f"sha256:{'a' * 64}", tmp_path)
    entry.folder.mkdir()
    (entry.folder / "weights").write_bytes(b"right")
    manifest = describe_folder(entry.folder, {})
    write_manifest(entry.folder, manifest)
    entry.lock.touch()
    check_artifact(entry.folder, manifest.digest)
    assert entry.is_complete
    (entry.folder / "weights").write_bytes(b"wrong")
    with pytest.raises(CannotServe, match="weights is corrupt"):
        check_artifact(entry.folder, manifest.digest)
    assert not entry.is_complete


def test_a_corrupt_artifact_ends_it_with_status_4(free_port: int, artifact: tuple[Path, str]) -> None:
    (artifact[0] / "weights").write_bytes(b"2")
    ended = launched(command_line(free_port, *artifact))
    assert ended.returncode == 4
    assert "weights is corrupt" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_corrupt_draft_ends_it_with_status_4_too(free_port: int, artifact: tuple[Path, str]) -> None:
    ended = launched([*command_line(free_port, *artifact), "--draft", str(artifact[0]), "sha256:other"])
    assert ended.returncode == 4
    assert "but sha256:other was requested" in ended.stderr


def test_a_member_without_a_secret_ends_with_status_2(free_port: int, artifact: tuple[Path, str]) -> None:
    ended = launched([*command_line(free_port, *artifact), "--followers", "1", "--leader", "127.0.0.1:34012"])
    assert ended.returncode == 2
    assert "SWITCHYARD_CELL_SECRET is not set" in ended.stderr


@pytest.mark.parametrize(("given", "named"), [("", "is not set"), ("x", "holds no certificate")])
def test_a_leader_without_a_certificate_ends_with_status_2(
    free_port: int, artifact: tuple[Path, str], given: str, named: str
) -> None:
    line = [*command_line(free_port, *artifact), "--followers", "1", "--leader", "127.0.0.1:34012"]
    ended = launched(line, SWITCHYARD_CELL_SECRET="s", SWITCHYARD_CELL_CERTIFICATE=given)
    assert ended.returncode == 2
    assert f"SWITCHYARD_CELL_CERTIFICATE {named}" in ended.stderr


def test_a_python_without_vllm_ends_it_with_status_3(free_port: int, artifact: tuple[Path, str]) -> None:
    ended = launched(command_line(free_port, *artifact))
    assert ended.returncode == 3
    assert "has no working vLLM" in ended.stderr


def test_packages_that_hand_prompts_over_are_missed_by_name_with_status_3(
    free_port: int, artifact: tuple[Path, str]
) -> None:
    ended = launched(command_line(free_port, *artifact, "--kv-port", "34001"))
    assert ended.returncode == 3
    named = "has no nixl, which hands prompts over: run python -m engine_agent.engines.vllm.kv_transfer install"
    assert named in ended.stderr


@pytest.mark.parametrize(
    ("stated", "is_mended"),
    [
        ((), False),
        (("--speculative-config", '{"method": "medusa"}'), True),
        (("--speculative-config", '{"method": "ngram"}'), True),
        (("--speculative-config", '{"method": "eagle"}'), False),
        (("--speculative-config", "["), False),
        (("--speculative-config", "[]"), False),
    ],
)
def test_workers_that_guess_in_a_way_that_needs_it_are_mended(stated: tuple[str, ...], is_mended: bool) -> None:
    read = parse(command_line(34003, Path("/model"), "sha256:00", "--", *stated))
    module = "engine_agent.engines.vllm.patched_worker.PatchedWorker"
    assert speculation_argv(read, OWN_SERVER) == (("--worker-extension-cls", module) if is_mended else ())
    assert speculation_argv(read, Server((), OWN_SERVER.run)) == ()


def test_what_hands_over_reads_again_what_it_cannot_have() -> None:
    argv = vllm_argv(replace(options(), kv_port=34001))
    config = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    assert (config["kv_connector"], config["kv_load_failure_policy"]) == ("NixlConnector", "recompute")
    assert "--kv-transfer-config" not in vllm_argv(options())
    wanted = node_environment(replace(options(), kv_port=34001), Path("/r"), 2, {})
    assert (wanted["VLLM_NIXL_SIDE_CHANNEL_HOST"], wanted["VLLM_NIXL_SIDE_CHANNEL_PORT"]) == ("127.0.0.1", "34001")


def test_the_core_publishes_what_it_stores_unless_it_stores_nothing_or_somewhere_else() -> None:
    folder = Path("/run/engine")
    name, config = cache_argv(options(), OWN_SERVER, folder)
    assert (name, json.loads(config)["endpoint"]) == ("--kv-events-config", "ipc:///run/engine/kv-events")
    for without in (("--no-enable-prefix-caching",), ("--data-parallel-size=2",), ("--kv-events-config", "{}")):
        assert cache_argv(options(*without), OWN_SERVER, folder) == ()
    assert cache_argv(options(), Server((), OWN_SERVER.run), folder) == ()
