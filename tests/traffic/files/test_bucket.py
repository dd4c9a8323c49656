"""Files in a bucket of the test cloud: complete or absent, through lost responses, truncated bodies and errors."""

from collections.abc import Iterator
from typing import Any

import pytest
from django.utils import timezone

from fleet.clouds.aws import objects as object_stream
from lab.cloud.server import World
from lab.cloud.world import Fault
from tests.traffic.bucket_store import FILES, cloud_of_files, keys, lost_answer, torn_body, uploads
from traffic.files.services.store import FileStore, NoSuchFile, StoreAway, file_store

pytestmark = [pytest.mark.cloud, pytest.mark.django_db]
LONG = bytes(range(256)) * 40 * 1024  # 10 MiB
PART = 5 * 1024 * 1024


@pytest.fixture
def world(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    settings.FILES = FILES
    monkeypatch.setattr(object_stream, "PART_BYTES", PART)
    with cloud_of_files(monkeypatch) as world:
        yield world


@pytest.fixture
def store(world: World) -> FileStore:
    return file_store()


def written(store: FileStore, name: str, content: bytes) -> str:
    writer = store.write(name)
    for start in range(0, len(content), 1024 * 1024):
        writer.write(content[start : start + 1024 * 1024])
    writer.commit()
    assert writer.bytes == len(content)
    return writer.sha256


@pytest.mark.parametrize("content", [b"", b"x\n", LONG, LONG[: 2 * PART], LONG[: PART + 1]])
def test_a_file_reads_as_it_was_written(world: World, store: FileStore, content: bytes) -> None:
    written(store, "files/a", content)
    with store.open("files/a") as file:
        assert file.read() == content
    with store.open("files/a", len(content) // 2) as file:
        assert file.read() == content[len(content) // 2 :]
    assert (keys(world), uploads(world)) == (["east/files/a"], [])
    assert store.read("files/a", 0, len(content)) == content if content else True


def test_a_file_is_invisible_until_commit_and_aborting_leaves_nothing(world: World, store: FileStore) -> None:
    writer = store.write("files/a")
    writer.write(LONG)
    assert (keys(world), len(uploads(world))) == ([], 1)
    with pytest.raises(NoSuchFile):
        store.open("files/a")
    writer.abort()
    assert (keys(world), uploads(world)) == ([], [])
    writer.abort()


def test_a_part_of_it_is_one_ranged_read(world: World, store: FileStore) -> None:
    written(store, "files/a", LONG)
    assert store.read("files/a", 1_000_003, 1_000_103) == LONG[1_000_003:1_000_103]
    assert world.count("GetObject") == 1


def test_what_is_there_is_never_replaced(world: World, store: FileStore) -> None:
    written(store, "files/a", LONG)
    with pytest.raises(StoreAway, match="exists with other content"):
        written(store, "files/a", LONG[:-1] + b"!")
    with pytest.raises(StoreAway, match="exists with other content"):
        written(store, "files/a", b"short")
    written(store, "files/a", LONG)  # repeating it is harmless
    with store.open("files/a") as file:
        assert file.read() == LONG


@pytest.mark.parametrize(("operation", "content"), [("PutObject", b"x"), ("CompleteMultipartUpload", LONG)])
@pytest.mark.parametrize("fault", [lost_answer, lambda name: Fault(name, "InternalError"),
                                   lambda name: Fault(name, "SlowDown", times=2)])  # fmt: skip
def test_an_answer_that_was_lost_or_an_error_of_s3_is_not_the_end(
    world: World, store: FileStore, operation: str, content: bytes, fault: Any
) -> None:
    world.faults.append(fault(operation))
    written(store, "files/a", content)
    with store.open("files/a") as file:
        assert file.read() == content
    assert uploads(world) == []


def test_a_body_that_breaks_off_is_read_on_from_there(world: World, store: FileStore) -> None:
    written(store, "files/a", LONG)
    world.faults.append(torn_body(times=2))
    with store.open("files/a") as file:
        assert file.read() == LONG
    assert world.count("GetObject") == 3


def test_a_body_that_breaks_off_again_and_again_is_given_up(world: World, store: FileStore) -> None:
    written(store, "files/a", b"")
    written(store, "files/b", b"x")
    world.faults.append(torn_body(times=99))
    with store.open("files/a") as file:
        assert file.read() == b""
    with pytest.raises(StoreAway, match="broke off"), store.open("files/b") as file:
        file.read()


def test_what_is_replaced_while_it_is_read_is_not_mixed(world: World, store: FileStore) -> None:
    written(store, "files/a", LONG)
    world.faults.append(torn_body())
    with store.open("files/a") as file:
        file.read(1)
        world.client("s3").put_object(Bucket="switchyard-files", Key="east/files/a", Body=LONG[::-1])
        with pytest.raises(StoreAway, match="was replaced while it was read"):
            file.read()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("AccessDenied", "access is denied"),
        ("SlowDown", "throttles requests"),
        ("InternalError", "InternalError"),
    ],
)
@pytest.mark.parametrize("operation", ["PutObject", "UploadPart", "CreateMultipartUpload"])
def test_what_s3_says_no_to_is_said_in_words(
    world: World, store: FileStore, operation: str, code: str, said: str
) -> None:
    world.faults.append(Fault(operation, code, times=9))
    with pytest.raises(StoreAway, match=said):
        written(store, "files/a", b"x" if operation == "PutObject" else LONG)


def test_a_bucket_that_is_not_there_is_named_so(world: World, settings: Any) -> None:
    settings.FILES = "s3://switchyard-none"
    with pytest.raises(StoreAway, match="there is no such bucket"):
        written(file_store(), "files/a", b"x")
    with pytest.raises(StoreAway, match="there is no such bucket"):
        file_store().open("files/a")


def test_a_journal_has_every_append_in_order_and_nothing_of_one_that_failed(world: World, store: FileStore) -> None:
    assert list(store.journal("batches/b/000000.0001")) == []
    journal = store.append("batches/b/000000.0001")
    for number in range(12):
        journal.append(b"%d a\n%d b\n" % (number, number))
    world.faults.append(Fault("PutObject", "InternalError", times=9))
    with pytest.raises(StoreAway):
        journal.append(b"lost\n")
    journal.close()
    assert list(store.journal("batches/b/000000.0001")) == [
        b"%d %s\n" % (number, each) for number in range(12) for each in (b"a", b"b")
    ]
    assert list(store.journal("batches/b/000000.0002")) == []


def test_files_and_folders_are_listed_deleted_and_swept(world: World, store: FileStore) -> None:
    written(store, "files/a", b"x")
    written(store, "batches/b/work-0001", b"x")
    written(store, "batches/b/000000.0001/000000", b"x")
    written(store, "batches/bc/work-0001", b"x")
    begun = store.write("files/lost")
    begun.write(LONG)
    assert [name for name, _ in store.names("files")] == ["files/a"]
    assert [name for name, _ in store.names("batches")] == ["batches/b", "batches/bc"]
    assert [*store.folders("batches")] == ["batches/b", "batches/bc"]
    assert [*store.folders("files")] == []
    assert all(abs(at - timezone.now().timestamp()) < 86_400 for _, at in store.names("batches"))
    store.delete_folder("batches/b")
    store.delete("files/a")
    store.delete("files/a")
    assert keys(world) == ["east/batches/bc/work-0001"]
    assert store.delete_unfinished(0.0) == 0
    assert store.delete_unfinished(timezone.now().timestamp() + 3600) == 1
    assert uploads(world) == []
