"""Forbidden rights of an account on a host are found, without false positives."""

import os

import pytest

from lab.hosts.check import trespass
from tests.lab.hosts.conftest import Lab, eventually

pytestmark = pytest.mark.processes

INTRUDER = "import os, time; os.setgroups([]); os.setgid({uid}); os.setuid({uid}); time.sleep(600)"
PREPARE = """
mkdir -p /var/lib/switchyard/machine /var/lib/switchyard/mine
chmod 711 /var/lib/switchyard /var/lib/switchyard/machine
umask 077
echo secret > /var/lib/switchyard/machine/key.pem
echo secret > /var/lib/switchyard/machine/forgotten
chmod 644 /var/lib/switchyard/machine/forgotten
echo own > /var/lib/switchyard/mine/file
chown -R 60900 /var/lib/switchyard/mine
setsid -f env SWITCHYARD_PROCESS=engine python3 -S -c '{first}' > /dev/null 2>&1
setsid -f env SWITCHYARD_PROCESS=proxy python3 -S -c '{second}' > /dev/null 2>&1
"""


def test_an_account_that_reads_what_is_not_its_own_is_named(lab: Lab) -> None:
    done = lab.run(
        "n1", "sh", "-ec", PREPARE.format(first=INTRUDER.format(uid=60900), second=INTRUDER.format(uid=60901))
    )
    if os.geteuid() != 0:  # without root all programs on the hosts run under one account
        assert list(trespass(lab.places, "n1")) == []
        return
    assert done.returncode == 0, done.stderr
    eventually(lambda: len(list(trespass(lab.places, "n1"))) == 2, "both run under their accounts")
    found = {account.name: account for account in trespass(lab.places, "n1")}
    assert {name: account.uid for name, account in found.items()} == {"engine": 60900, "proxy": 60901}
    for account in found.values():
        assert account.done == ("reads /var/lib/switchyard/machine/forgotten",)
