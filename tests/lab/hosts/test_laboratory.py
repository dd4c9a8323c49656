"""A small laboratory: hosts reach each other or not, fail and restart, and have their own clocks.

Every host starts an echo server at boot, which also records received datagrams.
"""

import subprocess
import time
from collections.abc import Iterator

import pytest

from lab.hosts.conditions import Lost
from lab.hosts.places import CHECKOUT
from tests.lab.hosts.conftest import ROUND_TRIP_S, Lab, eventually

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def healed(lab: Lab) -> Iterator[None]:
    yield
    lab.heal()


def test_regions_are_apart(lab: Lab) -> None:
    assert lab.connects_s("n1", "n3") >= ROUND_TRIP_S
    assert lab.connects_s("c1", "n3") >= ROUND_TRIP_S


def test_a_slow_host_is_slow_for_its_neighbours_too(lab: Lab) -> None:
    lab.ask("slow", name="n1", delay_s=0.04, loss=0.0)

    assert lab.connects_s("n2", "n1") >= 2 * 0.04
    assert lab.connects_s("n3", "n1") >= 2 * 0.04 + ROUND_TRIP_S
    assert "slow: 40 ms later each way" in lab.do("status")


def test_a_host_that_is_cut_off_is_not_reached_until_it_is_healed(lab: Lab) -> None:
    lab.do("cut", "n1")
    assert not lab.reaches("n2", "n1")
    assert not lab.reaches("n1", "n2")
    assert lab.connects_s("n2", "n3")

    lab.do("heal", "n1")
    assert lab.connects_s("n2", "n1")


def test_a_region_that_is_cut_off_works_inside(lab: Lab) -> None:
    lab.cut("us-west-2")

    assert not lab.reaches("n1", "n3")
    assert lab.connects_s("n4", "n3")


@pytest.mark.parametrize(("lost", "is_heard", "hears"), [(Lost.SENT, False, True), (Lost.RECEIVED, True, False)])
def test_a_cut_one_way_loses_packets_of_that_way_alone(lab: Lab, lost: Lost, is_heard: bool, hears: bool) -> None:
    lab.cut("n1", "n3", lost)
    lab.tell("n1", "n3", f"from-n1-{lost}")
    lab.tell("n3", "n1", f"from-n3-{lost}")
    assert not lab.reaches("n1", "n3")

    # What is sent over the same paths afterwards arrives last.
    lab.heal()
    lab.tell("n1", "n3", f"last-{lost}")
    lab.tell("n3", "n1", f"last-{lost}")
    eventually(lambda: f"last-{lost}" in lab.heard("n3") and f"last-{lost}" in lab.heard("n1"), "both hear again")
    assert (f"from-n1-{lost}" in lab.heard("n3")) is is_heard
    assert (f"from-n3-{lost}" in lab.heard("n1")) is hears


def test_without_power_nothing_runs_nothing_answers_and_files_stay(lab: Lab) -> None:
    # It would survive a signal to its group or session.
    lab.run("n2", "sh", "-c", "echo kept > /opt/kept; setsid -f sleep 1000.25 > /dev/null 2>&1")
    assert _running("sleep 1000.25")

    lab.do("power-off", "n2")
    assert not _running("sleep 1000.25")
    assert not lab.reaches("n1", "n2")
    assert "n2 has no power" in lab.command("exec", "n2", "--", "true").stderr
    assert "n2 has no power." in lab.command("power-off", "n2").stderr

    lab.do("boot", "n2")
    eventually(lambda: lab.reaches("n1", "n2"), "what n2 starts at boot answers")
    assert lab.run("n2", "cat", "/opt/kept").stdout == "kept\n"
    assert "n2 has power already." in lab.command("boot", "n2").stderr


def test_a_clock_is_one_hosts_own_and_intervals_stay_true(lab: Lab) -> None:
    lab.do("skew", "n1", "+1h")
    eventually(lambda: _clock(lab, "n1") - time.time() > 3500, "n1 is an hour ahead")
    lab.do("skew", "n1", "-10m")
    eventually(lambda: _clock(lab, "n1") - time.time() < -500, "n1 is ten minutes behind")

    before, there, after = time.monotonic(), _monotonic(lab, "n1"), time.monotonic()
    assert before <= there <= after
    assert abs(_clock(lab, "n2") - time.time()) < 60
    assert "10 m behind" in lab.do("status")
    lab.do("skew", "n1", "0")


def test_hosts_have_files_of_their_own_and_none_of_this_checkout(lab: Lab) -> None:
    lab.run("n1", "sh", "-c", "touch /tmp/own /var/lib/own /opt/own /etc/own /usr/local/own ~/own")

    assert lab.run("n2", "ls", "/tmp/own", "/var/lib/own", "/opt/own", "/etc/own").stdout == ""
    assert lab.run("n1", "touch", "/usr/own").returncode != 0
    assert lab.run("n1", "cat", f"{CHECKOUT}/pyproject.toml").returncode != 0
    assert "switchyard" in lab.run("c1", "cat", f"{CHECKOUT}/pyproject.toml").stdout
    assert lab.run("n1", "hostname").stdout == "n1\n"


def test_a_command_has_its_exit_status_and_what_cannot_be_is_one_sentence(lab: Lab) -> None:
    assert lab.command("exec", "n1", "--", "sh", "-c", "exit 7").returncode == 7
    for arguments, complaint in (
        (("cut", "n9"), "There is no 'n9' in this laboratory"),
        (("boot", "n9"), "There is no host 'n9'"),
        (("slow", "n1", "--delay", "soon"), "'soon' is no time"),
        (("slow", "n1", "--loss", "100%"), "a cut loses all"),
        (("skew", "n1", "noon"), "'noon' is no time"),
        (("up", "--bare"), "A laboratory runs already"),
    ):
        refused = lab.command(*arguments)
        assert refused.returncode == 1
        assert complaint in refused.stderr
        assert refused.stderr.count("\n") == 1


def _clock(lab: Lab, host: str) -> int:
    return int(lab.run(host, "date", "+%s").stdout)


def _monotonic(lab: Lab, host: str) -> float:
    return float(lab.python(host, "import time; print(time.monotonic())").stdout)


def _running(command_line: str) -> bool:
    found = subprocess.run(["pgrep", "-fx", command_line], capture_output=True, check=False)
    return found.returncode == 0
