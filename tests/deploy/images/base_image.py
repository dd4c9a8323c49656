"""A base image made of this computer's own files, for there may be no registry: its Python, a shell, and the few
programs that a slim Debian has and our images use, each with the libraries that it is linked to."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

PROGRAMS = (
    "sh", "cat", "chmod", "chown", "cp", "curl", "cut", "date", "env", "grep", "head", "id", "install", "kill", "ln",
    "ls", "mkdir", "mv", "readlink", "rm", "rmdir", "sed", "setsid", "sleep", "tail", "tr", "uname", "wc",
)  # fmt: skip
NOT_COPIED = ("site-packages", "test", "idlelib", "tkinter", "turtledemo", "lib2to3", "__pycache__", "*.a", "config-*")
CERTIFICATES = Path("/etc/ssl/certs")


def fill(root: Path) -> None:
    """Make `root` the file tree of such an image."""
    for folder in ("etc", "proc", "dev", "run", "root", "usr/local/bin", "usr/bin", "var/cache", "var/lib", "var/log"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for folder in ("tmp", "var/tmp"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder).chmod(0o1777)
    (root / "bin").symlink_to("usr/bin")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    programs = [Path(found) for name in PROGRAMS if (found := shutil.which(name))]
    for program in programs:
        shutil.copy(program, root / "usr/bin" / program.name)
    prefix = _python(root)
    modules = [path for path in prefix.rglob("*.so*") if path.is_file()]
    for library in _libraries([*programs, Path(sys.executable).resolve(), *modules]):
        target = root / library.relative_to("/")
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library.resolve(), target)
    if CERTIFICATES.is_dir():
        shutil.copytree(CERTIFICATES, root / CERTIFICATES.relative_to("/"), dirs_exist_ok=True)
    for folder, _, _ in os.walk(root):
        Path(folder).chmod(Path(folder).stat().st_mode | 0o055)


def _python(root: Path) -> Path:
    """This Python without what is installed into it, where it is, and `python3` on the path; returns its libraries."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    prefix = Path(sys.base_prefix)
    inside = root / prefix.relative_to("/")
    libraries = prefix / "lib" / version
    ignored = shutil.ignore_patterns(*NOT_COPIED)
    shutil.copytree(libraries, inside / "lib" / version, symlinks=True, ignore=ignored, dirs_exist_ok=True)
    (inside / "bin").mkdir(parents=True, exist_ok=True)
    program = Path(sys.executable).resolve()
    shutil.copy(program, inside / "bin" / version)
    for name in ("python3", version):
        link = root / "usr/local/bin" / name
        link.symlink_to(prefix / "bin" / version)
    return inside / "lib" / version


def _libraries(files: Iterable[Path]) -> Iterator[Path]:
    """What these need of shared libraries, by the loader's own word."""
    names = [str(path) for path in files]
    said = subprocess.run(["ldd", *names], capture_output=True, text=True, timeout=120, check=False).stdout
    for line in said.splitlines():
        found = next((part for part in line.split() if part.startswith("/") and not part.endswith(":")), "")
        if found and found not in names:
            yield Path(found)
