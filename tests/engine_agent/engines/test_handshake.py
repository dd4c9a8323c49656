"""Only members that prove the secret of this generation are admitted, inside TLS 1.3; others learn nothing and change
nothing."""

import contextlib
import hashlib
import json
import os
import socket
import ssl
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest

from engine_agent.engines.handshake import (
    MAX_LINE_BYTES,
    BadCertificate,
    Decision,
    FollowerHandshake,
    HandshakeFailed,
    Identity,
    LeaderHandshake,
    MembershipRefused,
    binding_of,
    follower_context,
    leader_certificate,
)
from engine_agent.node.identity import throwaway_certificate
from engine_agent.protocol.fingerprint import FINGERPRINT_MAX_FIELDS, FINGERPRINT_MAX_NAME, FINGERPRINT_MAX_VALUE
from tests.engine_agent.engines.between import old_tls

SOFTWARE = {"vllm": "0.32.0", "torch": "2.13.0"}
LEADER = Identity("c-1", 3, 0, "n-00000000", SOFTWARE, b"the secret of c-1, generation 3")
FOLLOWER = replace(LEADER, rank=1, node_id="n-00000001")
BINDING = b"digest of the leader's certificate"


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


class Meeting:
    """A leader and a follower on the two ends of one connection."""

    def __init__(
        self,
        follower: Identity = FOLLOWER,
        *,
        taken: str = "",
        taken_for_good: bool = True,
        leaders: bytes = BINDING,
        followers: bytes = BINDING,
    ) -> None:
        self.leader = LeaderHandshake(LEADER, 1, leaders)
        self.follower = FollowerHandshake(follower, followers)
        self.join = self.follower.join(self.leader.challenge)
        self.decision = self.decide(self.join, taken, taken_for_good=taken_for_good)

    def decide(self, join: bytes, taken: str = "", *, taken_for_good: bool = True) -> Decision:
        return self.leader.decide(join, lambda _: taken, taken_for_good=taken_for_good)

    def confirm(self) -> None:
        self.follower.confirm(self.decision.reply)


def test_both_sides_believe_each_other() -> None:
    meeting = Meeting()
    joined = meeting.decision.joined
    assert joined is not None
    assert (joined.rank, joined.node_id) == (1, "n-00000001")
    meeting.confirm()


def test_who_has_seen_another_certificate_than_the_leaders_is_not_let_in() -> None:
    meeting = Meeting(followers=b"digest of a stranger's certificate")
    assert meeting.decision.joined is None
    assert meeting.decision.reason == "node n-00000001 does not prove that it knows the secret of cell c-1"


@pytest.mark.parametrize("taken", ["", "too late"])
def test_a_leader_is_not_believed_over_another_certificate(taken: str) -> None:
    meeting, other = Meeting(taken=taken), b"digest of a stranger's certificate"
    meeting.follower = FollowerHandshake(FOLLOWER, other)
    meeting.follower.join(meeting.leader.challenge)
    with pytest.raises(HandshakeFailed, match=r"does not prove that it knows the cell's secret|refused: too late"):
        meeting.confirm()


def test_the_secret_never_travels() -> None:
    meeting = Meeting()
    sent = meeting.leader.challenge + meeting.join + meeting.decision.reply
    assert LEADER.secret not in sent
    assert LEADER.secret.hex().encode() not in sent
    assert "secret" not in repr(LEADER) + repr(meeting.decision)


def test_a_wrong_secret_is_refused_on_both_sides() -> None:
    meeting = Meeting(replace(FOLLOWER, secret=b"wrong"))
    assert meeting.decision.joined is None
    assert not meeting.decision.incompatible
    assert meeting.decision.reason == "node n-00000001 does not prove that it knows the secret of cell c-1"
    with pytest.raises(HandshakeFailed, match="refused: node n-00000001 does not prove that it knows the secret"):
        meeting.confirm()


@pytest.mark.parametrize(
    "claim", [{"rank": 2}, {"node": "n-00000009"}, {"fingerprint": "{}"}, {"nonce": "00"}, {"more": 1}], ids=str
)
def test_a_proof_covers_every_claim(claim: dict[str, Any]) -> None:
    meeting = Meeting()
    changed = line(**{**json.loads(meeting.join), **claim})
    assert "does not prove" in meeting.decide(changed).reason


def test_a_leader_with_another_secret_is_not_believed() -> None:
    meeting = Meeting()
    with pytest.raises(HandshakeFailed, match="does not prove that it knows the cell's secret"):
        meeting.follower.confirm(line(proof="00"))


def test_the_followers_own_proof_sent_back_proves_no_leader() -> None:
    meeting = Meeting()
    with pytest.raises(HandshakeFailed, match="does not prove that it knows the cell's secret"):
        meeting.follower.confirm(line(proof=json.loads(meeting.join)["proof"]))


def test_a_welcome_to_another_connection_proves_no_leader() -> None:
    with pytest.raises(HandshakeFailed, match="does not prove that it knows the cell's secret"):
        Meeting().follower.confirm(Meeting().decision.reply)


@pytest.mark.parametrize("other", [replace(FOLLOWER, generation=4), replace(FOLLOWER, cell="c-2")], ids=str)
def test_a_leader_of_another_generation_or_cell_gets_no_join(other: Identity) -> None:
    challenge = LeaderHandshake(LEADER, 1, BINDING).challenge
    with pytest.raises(HandshakeFailed, match="leads cell c-1 generation 3, not"):
        FollowerHandshake(other, BINDING).join(challenge)


def test_a_join_of_another_generation_is_refused_though_it_is_proved() -> None:
    other = LeaderHandshake(replace(LEADER, generation=4), 1, BINDING)
    join = FollowerHandshake(replace(FOLLOWER, generation=4), BINDING).join(other.challenge)
    assert Meeting().decide(join).reason == "this is cell c-1 generation 3, not cell c-1 generation 4"


def test_a_rank_that_the_cell_does_not_have_is_refused() -> None:
    meeting = Meeting(replace(FOLLOWER, rank=2))
    assert meeting.decision.reason == "rank 2 is not 1 to 1"
    with pytest.raises(HandshakeFailed, match="refused: rank 2 is not 1 to 1"):
        meeting.confirm()


def test_a_taken_rank_is_refused_for_good_where_the_leader_says_so() -> None:
    meeting = Meeting(taken="too late: rank 1 is in the cell already")
    assert meeting.decision.joined is None
    assert not meeting.decision.incompatible
    with pytest.raises(MembershipRefused, match=r"^too late: rank 1 is in the cell already$"):
        meeting.confirm()


def test_a_taken_rank_may_be_asked_for_again_otherwise() -> None:
    with pytest.raises(HandshakeFailed, match="refused: the cell is ending"):
        Meeting(taken="the cell is ending", taken_for_good=False).confirm()


def test_other_software_is_named_on_both_sides() -> None:
    difference = r"rank 1 \(n-00000001\) differs from rank 0 \(n-00000000\): vllm is 0.31.0 instead of 0.32.0"
    meeting = Meeting(replace(FOLLOWER, fingerprint={**SOFTWARE, "vllm": "0.31.0"}))
    assert meeting.decision.incompatible
    with pytest.raises(MembershipRefused, match=difference) as refused:
        meeting.confirm()
    assert str(refused.value) == meeting.decision.reason


def test_an_impostor_cannot_refuse_in_the_leaders_name() -> None:
    with pytest.raises(HandshakeFailed, match="refused: go away"):
        Meeting().follower.confirm(line(refused="go away", proof="00"))


def test_a_proved_refusal_holds_for_its_own_reason_alone() -> None:
    meeting = Meeting(taken="too late")
    proof = json.loads(meeting.decision.reply)["proof"]
    with pytest.raises(HandshakeFailed, match="refused: go away"):
        meeting.follower.confirm(line(refused="go away", proof=proof))


def test_a_join_cannot_be_played_back() -> None:
    recorded = Meeting().join
    assert "does not prove" in Meeting().decide(recorded).reason


def test_the_largest_fingerprint_fits_into_a_join() -> None:
    fields = {f"{at:0{FINGERPRINT_MAX_NAME}d}": "x" * FINGERPRINT_MAX_VALUE for at in range(FINGERPRINT_MAX_FIELDS)}
    meeting = Meeting(replace(FOLLOWER, fingerprint=fields))
    assert len(meeting.join) < MAX_LINE_BYTES
    assert meeting.decision.incompatible


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n", b"[1]\n", b"\x80\x04.\n", b""], ids=repr)
def test_what_is_no_handshake_gets_no_reply(sent: bytes) -> None:
    meeting = Meeting()
    for received in (meeting.decide, meeting.follower.join, meeting.follower.confirm):
        with pytest.raises(HandshakeFailed, match="the server speaks another protocol"):
            received(sent)


@pytest.mark.parametrize("proof", ["ä", "\ud800", 7, None, {}], ids=ascii)
def test_what_cannot_be_a_proof_is_none(proof: object) -> None:
    meeting = Meeting()
    assert "does not prove" in meeting.decide(line(**{**json.loads(meeting.join), "proof": proof})).reason


def certificate_part(pem: str) -> str:
    return pem[: pem.index("-----BEGIN PRIVATE KEY-----")]


def shaken(client: ssl.SSLContext) -> ssl.SSLSocket:
    """A client's end of a connection to a leader that has shaken hands."""
    ours, theirs = socket.socketpair()
    leader = leader_certificate(throwaway_certificate())

    def serve() -> None:
        try:
            leader.context.wrap_socket(theirs, server_side=True).close()
        except OSError:
            theirs.close()

    serving = Thread(target=serve, daemon=True)
    serving.start()
    try:
        return client.wrap_socket(ours)
    finally:
        serving.join()


def test_members_speak_tls_1_3() -> None:
    with shaken(follower_context()) as connection:
        assert connection.version() == "TLSv1.3"


def test_older_tls_is_refused() -> None:
    with pytest.raises(ssl.SSLError, match=r"PROTOCOL_VERSION|protocol version"):
        shaken(old_tls())


def test_what_is_signed_is_the_digest_of_the_certificate_that_the_follower_sees() -> None:
    pem = throwaway_certificate()
    der = ssl.PEM_cert_to_DER_cert(certificate_part(pem))
    assert leader_certificate(pem).binding == binding_of(der) == hashlib.sha256(der).digest()


def test_every_start_has_a_certificate_of_its_own() -> None:
    assert leader_certificate(throwaway_certificate()).binding != leader_certificate(throwaway_certificate()).binding


def open_files() -> set[str]:
    """Number and path of each, in memory or on a disk; threads of other tests may open and close connections."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that with which they were listed, or one that was closed since
            path = os.readlink(f"/proc/self/fd/{number}")
            found |= {f"{number} {path}"} if path.startswith("/") else set()
    return found


def test_the_key_is_in_no_open_file_and_in_no_text() -> None:
    before = open_files()
    held = leader_certificate(throwaway_certificate())
    assert open_files() <= before
    assert "context" not in repr(held)


@pytest.mark.parametrize(
    "given", ["", "no PEM", certificate_part(throwaway_certificate())], ids=["none", "text", "keyless"]
)
def test_what_is_no_certificate_with_its_key_is_refused(given: str) -> None:
    with pytest.raises(BadCertificate, match="holds no certificate and its key as PEM"):
        leader_certificate(given)


def test_the_key_of_another_certificate_is_refused() -> None:
    one, other = throwaway_certificate(), throwaway_certificate()
    with pytest.raises(BadCertificate, match="KEY_VALUES_MISMATCH"):
        leader_certificate(certificate_part(one) + other[len(certificate_part(other)) :])
