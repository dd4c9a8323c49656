"""A host's files: which folders are its own, and which it sees of the real host's, all read-only. Decides, and mounts
them in a namespace of the host's. What a host wrote lies below the laboratory's folder and outlives its power."""

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lab.hosts import kernel

OWN = ("/tmp", "/var", "/opt", "/root", "/home", "/srv")  # noqa: S108 - of the laboratory's host, empty at first
"""Folders of which a host sees nothing but its own."""
ON_TOP = ("/etc", "/usr/local")
"""Folders in which a host sees the real one's files and keeps its own changes."""
MODES = {"/tmp": 0o1777, "/root": 0o700}  # noqa: S108
INSIDE_VAR = ("cache", "lib", "log", "run", "spool", "tmp")
LABORATORY = "/run/lab"
"""Where a host sees what the laboratory gives it: its clock, and the library that shows it."""
VOLATILE = {"/run": "mode=755", "/dev/shm": "mode=1777"}  # noqa: S108
START_AT_BOOT = "/etc/local.d"
"""As in OpenRC: what is executable there and ends with `.start` is run when the host boots."""
_ESCAPED = re.compile(r"\\([0-7]{3})")
"""How /proc writes a blank."""
_KEPT_FLAGS = {
    os.ST_NOSUID: kernel.MS_NOSUID,
    os.ST_NODEV: kernel.MS_NODEV,
    os.ST_NOEXEC: kernel.MS_NOEXEC,
}


@dataclass(frozen=True, slots=True)
class FileTree:
    """`folder`: where the host's files are kept. `shown`: folders of the real host that it sees although they lie in
    one of `OWN`. `hidden`: folders that it does not see although they lie elsewhere. `given`: see `LABORATORY`.
    `devices`: names of empty files in its /dev; without any it sees the real one."""

    folder: Path
    shown: tuple[str, ...]
    hidden: tuple[str, ...]
    given: Path
    is_root: bool
    devices: tuple[str, ...] = ()


def etc_files(name: str, addresses: Iterable[tuple[str, str]]) -> dict[str, str]:
    """A host's own files in /etc. It has no name server, because nothing here reaches the Internet."""
    lines = ["127.0.0.1 localhost", *(f"{address} {host}" for host, address in addresses)]
    return {"hostname": f"{name}\n", "hosts": "\n".join(lines) + "\n", "resolv.conf": "options attempts:1 timeout:1\n"}


def place_of(folder: Path, path: str) -> Path:
    """Returns the place of the host's file `path` in the folder of its files. Raises ValueError if the file does not
    belong to the host."""
    for name in (*OWN, *ON_TOP):
        if path.startswith(f"{name}/") and ".." not in path.split("/"):
            own = _folder_of(folder, name) / "changes" if name in ON_TOP else _folder_of(folder, name)
            return own / path.removeprefix(f"{name}/")
    raise ValueError(f"{path} is no file of a host's own: give one below {', '.join((*OWN, *ON_TOP))}.")


def write(folder: Path, path: str, text: str) -> None:
    """Give a host a file before it boots; one that begins with `#!` is executable. Raises ValueError if it would not be
    the host's own."""
    file = place_of(folder, path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755 if text.startswith("#!") else 0o644)


def make(tree: FileTree, etc: dict[str, str]) -> None:
    """Make the folders of a new host; those of one that has run stay as they are."""
    for name in OWN:
        own = _folder_of(tree.folder, name)
        own.mkdir(parents=True, exist_ok=True)
        own.chmod(MODES.get(name, 0o755))
    for name in INSIDE_VAR:
        inside = _folder_of(tree.folder, "/var") / name
        inside.mkdir(exist_ok=True)
        inside.chmod(0o1777 if name == "tmp" else 0o755)
    for name in ON_TOP:
        for part in ("changes", "scratch"):
            (_folder_of(tree.folder, name) / part).mkdir(parents=True, exist_ok=True)
    changes = _folder_of(tree.folder, "/etc") / "changes"
    (changes / Path(START_AT_BOOT).name).mkdir(exist_ok=True)
    for file, text in etc.items():
        (changes / file).write_text(text)


def remove_files(folder: Path) -> None:
    for depth in ("*", "files/*", "*/files/*"):
        for working in folder.glob(f"{depth}/scratch/work"):
            working.chmod(0o700)  # overlayfs's own folder, closed even to its owner
    shutil.rmtree(folder, ignore_errors=True)


def mount(tree: FileTree) -> None:
    """Make this process's mount namespace, a new one, see the host's files. Raises OSError if the kernel refused; the
    text says at which folder."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    real = _mount_points()
    held = {path: os.open(path, os.O_PATH) for path in tree.shown if Path(path).is_dir()}
    given, folder = os.open(tree.given, os.O_PATH), os.open(tree.folder, os.O_PATH)
    top = {name: _on_top(f"/proc/self/fd/{folder}/{_name(name)}", tree.is_root) for name in ON_TOP}
    writable = {*OWN, *VOLATILE, *ON_TOP}
    for name, options in top.items():
        _at(name, "overlay", name, "overlay", 0, f"lowerdir={name},{options}")
    for name in OWN:
        if Path(name).is_dir():
            _at(name, f"/proc/self/fd/{folder}/{_name(name)}", name, None, kernel.MS_BIND)
    if tree.devices:
        _own_devices(tree.devices)
    for name, options in VOLATILE.items():
        _at(name, "tmpfs", name, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    for path in tree.hidden:
        if Path(path).is_dir():
            _at(path, "tmpfs", path, "tmpfs", 0, "mode=755,size=64k")
    for path, descriptor in held.items():
        Path(path).mkdir(parents=True, exist_ok=True)
        _at(path, f"/proc/self/fd/{descriptor}", path, None, kernel.MS_BIND | kernel.MS_REC)
    Path(LABORATORY).mkdir()
    _at(LABORATORY, f"/proc/self/fd/{given}", LABORATORY, None, kernel.MS_BIND)
    for descriptor in (*held.values(), given, folder):
        os.close(descriptor)
    for place in (*real, *tree.hidden, *tree.shown):
        if place not in writable and not place.startswith(("/proc", "/sys")):
            _read_only(place)
    _at("/sys", "sysfs", "/sys", "sysfs", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    _at("/proc", "proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)


REAL_DEVICES = ("full", "null", "random", "tty", "urandom", "zero")
DEVICE_LINKS = {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}


def _own_devices(names: Iterable[str]) -> None:
    """A /dev of the host's own: the devices that every program needs, and an empty file for each of these names."""
    real = {name: os.open(f"/dev/{name}", os.O_PATH) for name in REAL_DEVICES}
    _at("/dev", "tmpfs", "/dev", "tmpfs", kernel.MS_NOSUID, "mode=755,size=64k")
    for name, descriptor in real.items():
        Path("/dev", name).touch()
        _at(f"/dev/{name}", f"/proc/self/fd/{descriptor}", f"/dev/{name}", None, kernel.MS_BIND)
        os.close(descriptor)
    for name, target in DEVICE_LINKS.items():
        Path("/dev", name).symlink_to(f"/proc/self/{target}")
    for name in names:
        Path("/dev", name).parent.mkdir(exist_ok=True)
        Path("/dev", name).touch()
    Path("/dev/shm").mkdir()  # noqa: S108 - of the host, whose own is mounted next


def _on_top(folder: str, is_root: bool) -> str:
    # Who is not really root may not set the attributes that overlayfs keeps its books in.
    return f"upperdir={folder}/changes,workdir={folder}/scratch" + ("" if is_root else ",userxattr")


def _folder_of(folder: Path, name: str) -> Path:
    return folder / _name(name)


def _name(path: str) -> str:
    return path.strip("/").replace("/", "-")


def _at(place: str, source: str, target: str, kind: str | None, flags: int = 0, options: str | None = None) -> None:
    try:
        kernel.mount(source, target, kind, flags, options)
    except OSError as error:
        raise OSError(error.errno, f"{place} cannot be the host's own: {error.strerror}") from None


def _mount_points() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    places = (line.split()[4] for line in lines)
    return list(dict.fromkeys(_ESCAPED.sub(lambda found: chr(int(found[1], 8)), place) for place in places))


def _read_only(place: str) -> None:
    """What is not there any more needs nothing. A mount keeps its restrictions: the kernel refuses to have fewer."""
    try:
        flags = os.statvfs(place).f_flag
        kept = sum(flag for seen, flag in _KEPT_FLAGS.items() if flags & seen)
        kernel.mount("none", place, None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kept)
    except OSError:
        if place == "/":
            raise
