"""Whether a laboratory's fleet works: a streamed answer through every ingress, a host that loses its power, and whether
each connection between hosts is encrypted. It says what it sees, a line each, and collects what is wrong."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx

from lab.hosts import client
from lab.hosts.fleet import DEPLOYMENT, READY_WITHIN_S, Fleet
from lab.hosts.hops import Hop
from lab.hosts.places import Places
from lab.hosts.topology import NoLaboratory, Role, Topology

PRIVATE = ("/var/lib/switchyard", "/etc/shadow")
"""Below these folders no account may read the files of another one."""
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
            details = dict(line.partition("=")[::2] for line in variables)
            found.setdefault(uid, (details.get("SWITCHYARD_PROCESS") or os.path.basename(words[0]), int(pid)))
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
    """Runs in a separate process, which does not return."""
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
others = {uid: [pid for other, (_, pid) in known.items() if other != uid] for uid in known}
agents = [int(pid) for pid in filter(str.isdecimal, os.listdir("/proc")) if is_agent(pid)]
print(json.dumps({
    "files": len(files),
    "accounts": {
        name: {"uid": uid, "done": tried(uid, pid, files, [*others[uid], *agents])}
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
    """Try it as each account that a process of the host has and that is not root's. Raises NoLaboratory if the host
    does not answer."""
    done = client.captured(places, host, ["python3", "-I", "-S", "-c", PROGRAM, *PRIVATE])
    if done.returncode:
        raise NoLaboratory(f"{host}: could not check what accounts may do: {done.stderr.strip()[-300:]}")
    for name, details in json.loads(done.stdout)["accounts"].items():
        yield Account(host, name, details["uid"], tuple(details["done"]))


ANSWER_WITHIN_S = 60.0
TRIES = 30
PAUSE_S = 2.0
WATCH_S = 15.0
NOTICED_WITHIN_S = 120.0


@dataclass
class Check:
    """One check. `say`: where progress goes; `wrong`: what was found."""

    places: Places
    topology: Topology
    fleet: Fleet
    forwards: list[client.Forward]
    say: Callable[[str], None]
    wrong: list[str] = field(default_factory=list)

    def run(self) -> bool:
        self._answers("")
        self._power_off()
        self._trespassers()
        self._hops()
        for line in self.wrong:
            self.say(f"WRONG: {line}")
        verdict = (
            f"{len(self.wrong)} things are wrong" if self.wrong else "every hop between hosts is TLS, and all is well"
        )
        self.say(f"lab check: {verdict}")
        return not self.wrong

    def _answers(self, when: str) -> None:
        for each in self.forwards:
            if each.by_loopback or each.host not in self._powered():
                continue
            problem = _stream(each.here)
            region = self.topology.host(each.host).site
            if problem:
                self.wrong.append(f"no streamed answer through {each.host} in {region}{when}: {problem}")
            else:
                self.say(f"a streamed answer through {each.host} in {region}{when}")

    def _powered(self) -> set[str]:
        return {host["name"] for host in client.ask(self.places, "status")["hosts"] if host["power"]}

    def _power_off(self) -> None:
        [cell, *_] = sorted(
            (each for each in self.fleet.rows("cells") if each["state"] == "ready"), key=lambda row: row["id"]
        )
        machines = {row["node"]: row for row in self.fleet.rows("machines")}
        addresses = {str(host.address): name for name, host in self.topology.hosts.items()}
        members = [row["id"] for row in self.fleet.rows("nodes") if row.get("cell") == cell["id"]]
        hosts = [addresses[machines[node]["address"]] for node in members if node in machines]
        if not hosts:
            raise NoLaboratory(f"No host of {cell['id']} is known: its nodes are {members}.")
        name = hosts[0]
        began = time.monotonic()
        client.ask(self.places, "power-off", name=name)
        self.say(f"{name} of {cell['id']} has lost its power")
        try:
            self.fleet.until(
                lambda: self._ready_still(cell["id"]), NOTICED_WITHIN_S, f"the loss of {name} was not noticed"
            )
            how = f"without {name}"
            if not self._has_spare(cell["region"]):
                client.ask(self.places, "boot", name=name)
                how = f"once {name} has power"
                self.say(f"{name} has power again, for there is no spare")
            self.fleet.until(self._not_ready, READY_WITHIN_S, f"not every cell is ready again {how}")
            self.say(f"every cell is ready again {time.monotonic() - began:.1f} s after that")
            self._answers(f" {how}")
        except NoLaboratory as error:
            self.wrong.append(str(error))
        finally:
            if name not in self._powered():
                client.ask(self.places, "boot", name=name)

    def _has_spare(self, region: str) -> bool:
        rows = self.fleet.rows("nodes")
        return any(row["region"] == region and row["role"] == "spare" and row["state"] == "ready" for row in rows)

    def _ready_still(self, cell: str) -> str:
        ready = any(row["id"] == cell and row["state"] == "ready" for row in self.fleet.rows("cells"))
        return f"{cell} is ready" if ready else ""

    def _not_ready(self) -> str:
        rows = self.fleet.rows("cells")
        waiting = [f"{row['id']} is {row['state']}" for row in rows if row["state"] not in {"ready", "stopped"}]
        return "; ".join(waiting) if rows else "there is none"

    def _trespassers(self) -> None:
        """An account of an engine, a cell proxy or a HAProxy can read nothing of the agent or of other accounts."""
        seen = 0
        for name in sorted(self._powered()):
            host = self.topology.hosts.get(name)
            if host is None or host.role not in {Role.NODE, Role.INGRESS}:
                continue
            for account in trespass(self.places, name):
                seen += 1
                self.wrong += [f"{account.name} on {name} (uid {account.uid}) {what}" for what in account.done]
        what = f"{seen} accounts of engines, cell proxies and HAProxies were tried" if seen else "no agent is root here"
        self.say(f"  {what}")

    def _hops(self) -> None:
        seen = [Hop(**row) for row in client.ask(self.places, "hops", seconds=WATCH_S)]
        for hop in seen:
            self.say(f"  {hop}")
        self.wrong += [f"plain text between hosts: {hop}" for hop in seen if not hop.is_encrypted]
        if not seen:
            self.wrong.append("no connection between hosts was seen")


def _stream(port: int) -> str:
    """Ask for a streamed answer, a few times where a region has just changed; why there was none, or nothing."""
    body = {"model": DEPLOYMENT, "stream": True, "max_tokens": 16, "messages": [{"role": "user", "content": "Hello?"}]}
    problem = ""
    for _ in range(TRIES):
        try:
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            with httpx.stream("POST", url, json=body, timeout=ANSWER_WITHIN_S) as answer:
                lines = [line for line in answer.iter_lines() if line.startswith("data:")]
            if answer.status_code == 200 and lines and lines[-1] == "data: [DONE]" and _says_something(lines):
                return ""
            problem = f"status {answer.status_code}, {len(lines)} events"
        except httpx.HTTPError as error:
            problem = repr(error)
        time.sleep(PAUSE_S)
    return problem


def _says_something(lines: list[str]) -> bool:
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    return any(choice["delta"].get("content") for chunk in chunks for choice in chunk.get("choices", []))
