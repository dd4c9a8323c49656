import stat
from pathlib import Path

import pytest

from controlplane.embedded.configuration import CannotStart
from controlplane.embedded.privileges import (
    Account,
    is_closed_to,
    prepare_socket_folder,
    remove_socket_folder,
    server_account,
    socket_folder,
)

LONGEST_SOCKET_PATH_BYTES = 107
POSTGRES_LOCK = ".s.PGSQL.5432.lock"


def test_the_path_stays_short_however_long_the_homes_is() -> None:
    folder = socket_folder(Path("/srv") / ("x" * 200) / ".switchyard")
    assert len(str(folder / POSTGRES_LOCK)) < LONGEST_SOCKET_PATH_BYTES


def test_each_home_has_its_own_and_finds_it_again() -> None:
    assert socket_folder(Path("/a")) == socket_folder(Path("/a"))
    assert socket_folder(Path("/a")) != socket_folder(Path("/b"))


def test_the_folder_is_private_to_the_servers(tmp_path: Path) -> None:
    folder, account = tmp_path / "sockets", server_account()
    folder.mkdir(mode=0o777)
    prepare_socket_folder(folder, account)
    found = folder.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o700, account.uid)
    remove_socket_folder(folder)
    assert not folder.exists()


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "sockets").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CannotStart, match="belongs to another account"):
        prepare_socket_folder(tmp_path / "sockets", server_account())


def test_a_folder_on_the_way_that_is_closed_to_the_account_is_noticed(tmp_path: Path) -> None:
    other = Account(uid=54321, gid=54321, drop="other")
    inside = tmp_path / "closed" / "inside"
    inside.mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)
    assert is_closed_to(other, inside)
    assert not is_closed_to(other, Path("/usr"))
