"""What somebody finds who has broken into an engine, a cell proxy or a HAProxy of a host whose agent is root: tries,
with the account and in the file system of such a process, what it must not do. It changes nothing.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from lab.hosts import client
from lab.hosts.places import Places
from lab.hosts.topology import NoLaboratory

PRIVATE = ("/var/lib/switchyard", "/etc/shadow")
"""Below them whatever belongs to another account is nobody else's to read."""
PROGRAM = r'''
import ctypes, json, os, stat, sys

LIBC = ctypes.CDLL(None, use_errno=True)
PRIVATE = sys.argv[1:]


def kinds():
    """Of each account that is not root, one of its processes: what it is, and its pid."""
    found = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            uid = os.stat(f"/proc/{pid}").st_uid
            words = open(f"/proc/{pid}/cmdline", "rb").read().decode(errors="replace").split("\0")
            variables = open(f"/proc/{pid}/environ", "rb").read().decode(errors="replace").split("\0")
        except OSError:
            continue
        if uid:
            said = dict(line.partition("=")[::2] for line in variables)
            found.setdefault(uid, (said.get("SWITCHYARD_PROCESS") or os.path.basename(words[0]), int(pid)))
    return found


def private_files():
    """Paths, and who owns them."""
    for top in PRIVATE:
        if os.path.isfile(top):
            yield top, os.lstat(top).st_uid
        for folder, _, names in os.walk(top):
            for name in names:
                path = os.path.join(folder, name)
                try:
                    status = os.lstat(path)
                except OSError:  # it is gone already
                    continue
                if stat.S_ISREG(status.st_mode):
                    yield path, status.st_uid


def is_agent(pid):
    """Whether it is root's and has a program: threads of the kernel have none."""
    try:
        return os.path.exists(f"/proc/{pid}/exe") and os.stat(f"/proc/{pid}").st_uid == 0
    except OSError:
        return False


def attempts(uid, files, others):
    """What succeeds that must not."""
    for path, owner in files:
        if owner != uid and succeeds(lambda: open(path, "rb").read(1)):
            yield f"reads {path}"
        if owner != uid and succeeds(lambda: open(path, "ab")):
            yield f"writes {path}"
    for other in others:
        if succeeds(lambda: open(f"/proc/{other}/environ", "rb").read(1)):
            yield f"reads the environment of process {other}"
        if succeeds(lambda: os.kill(other, 0)):
            yield f"may end process {other}"
    if succeeds(lambda: os.setuid(0)):
        yield "becomes root"


def succeeds(attempt):
    try:
        attempt()
    except OSError:
        return False
    return True


def tried(uid, pid, files, others):
    """In a process of its own, which never comes back."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            space = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
            if LIBC.setns(space, 0):
                raise OSError(ctypes.get_errno(), "setns")
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            answer = list(attempts(uid, files, others))
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            answer = []
        except BaseException as error:
            answer = [f"cannot be tried: {error!r}"]
        os.write(writing, json.dumps(answer[:50]).encode())
        os._exit(0)
    os.close(writing)
    answer = json.loads(open(reading, "rb").read())
    os.wait()
    return answer


known, files = kinds(), list(private_files())
strangers = {uid: [pid for other, (_, pid) in known.items() if other != uid] for uid in known}
agents = [int(pid) for pid in filter(str.isdecimal, os.listdir("/proc")) if is_agent(pid)]
print(json.dumps({
    "files": len(files),
    "accounts": {
        name: {"uid": uid, "done": tried(uid, pid, files, [*strangers[uid], *agents])}
        for uid, (name, pid) in known.items()
    },
}))
'''


@dataclass(frozen=True, slots=True)
class Account:
    """Of what runs as `name` on a host. `done`: what it could do and must not."""

    host: str
    name: str
    uid: int
    done: tuple[str, ...]


def trespass(places: Places, host: str) -> Iterator[Account]:
    """Try it as each account that a process of the host has and that is not root's.

    Raises:
        NoLaboratory: the host does not answer.
    """
    done = client.captured(places, host, ["python3", "-I", "-S", "-c", PROGRAM, *PRIVATE])
    if done.returncode:
        raise NoLaboratory(f"{host}: nobody can try what accounts may do: {done.stderr.strip()[-300:]}")
    for name, said in json.loads(done.stdout)["accounts"].items():
        yield Account(host, name, said["uid"], tuple(said["done"]))
