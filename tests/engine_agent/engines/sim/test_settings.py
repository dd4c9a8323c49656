"""The command line: what is taken, and what is refused by name."""

from collections.abc import Mapping

import pytest

from engine_agent.engines.base import CELL_CERTIFICATE_VARIABLE, CELL_SECRET_VARIABLE
from engine_agent.engines.openai_http import Endpoint
from engine_agent.engines.sim.faults import Slow
from engine_agent.engines.sim.settings import Settings, parse_settings
from engine_agent.node.identity import throwaway_certificate
from engine_agent.protocol.fingerprint import FINGERPRINT_VARIABLE
from engine_agent.protocol.states import MemberRole

LEADER = (
    "--node-id n-0000000a --cell c-1 --generation 3 --rank 0 --role leader --port 1003 "
    "--admin-port 1004 --served-model sim-70b --leader 127.0.0.1:1008 --followers 1"
)


GIVEN = {CELL_SECRET_VARIABLE: "s", CELL_CERTIFICATE_VARIABLE: throwaway_certificate()}


def parsed(text: str, environment: Mapping[str, str] = GIVEN) -> Settings:
    return parse_settings(text.split(), environment)


def test_the_agents_command_line_is_understood() -> None:
    settings = parsed(f"{LEADER} --decode-step-ms 7 --max-num-seqs 3 --load-time-s 0 --seed 5")

    assert settings.role is MemberRole.LEADER
    assert settings.leader == Endpoint("127.0.0.1", 1008)
    assert (settings.model.decode_step_ms, settings.model.max_num_seqs, settings.model.seed) == (7, 3, 5)
    assert (settings.secret, settings.grace_s, settings.rendezvous_timeout_s) == ("s", 5, 120)


def test_a_bad_version_has_its_fault_from_the_start() -> None:
    line = [*LEADER.split(), "--fault", '{"kind": "slow", "factor": 1.5}']
    assert parse_settings(line, GIVEN).fault == Slow(1.5)
    assert parsed(LEADER).fault is None


def test_a_cell_of_one_node_needs_no_secret_and_no_certificate() -> None:
    assert parsed(LEADER.replace("--followers 1", "--followers 0"), {}).certificate is None


def test_a_follower_needs_no_certificate() -> None:
    follower = LEADER.replace("--rank 0 --role leader", "--rank 1 --role follower")
    assert parsed(follower, {CELL_SECRET_VARIABLE: "s"}).certificate is None


@pytest.mark.parametrize(
    ("given", "named"), [({}, "is not set"), ({CELL_CERTIFICATE_VARIABLE: "x"}, "holds no certificate")]
)
def test_a_leader_of_followers_needs_a_certificate(
    given: dict[str, str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(LEADER, {CELL_SECRET_VARIABLE: "s", **given})

    assert f"{CELL_CERTIFICATE_VARIABLE} {named}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (LEADER.replace("--rank 0", "--rank 1"), "--rank: 1 cannot be the leader's"),
        (LEADER.replace("--role leader", "--role follower"), "--rank: 0 cannot be the follower's"),
        (LEADER.replace("--rank 0 --role leader", "--rank 2 --role follower"), "--rank: 2 exceeds --followers 1"),
        (f'{LEADER} --fault {{"kind":"tired"}}', "--fault: Invalid value 'tired'"),
        (LEADER.replace("127.0.0.1:1008", "1008"), "--leader: expected HOST:PORT, got '1008'"),
        (LEADER.replace("--port 1003", "--port 70000"), "--port: expected a port, 1 to 65535, got '70000'"),
        (f"{LEADER} --decode-step-ms fast", "--decode-step-ms: expected a number above 0, got 'fast'"),
        (f"{LEADER} --prefill-tokens-per-s nan", "--prefill-tokens-per-s: expected a number above 0"),
        (f"{LEADER} --max-num-seqs 0", "--max-num-seqs: expected a whole number, 1 or more"),
        (LEADER.replace("--cell c-1 ", ""), "--cell"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(line: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parsed(line)

    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


def test_a_cell_of_several_nodes_needs_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(LEADER, {})

    assert CELL_SECRET_VARIABLE in capsys.readouterr().err


def test_what_the_rank_runs_comes_from_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    told = {**GIVEN, FINGERPRINT_VARIABLE: '{"kernel": "6.8"}'}
    assert parse_settings(LEADER.split(), told).fingerprint == {"kernel": "6.8"}
    assert parsed(LEADER).fingerprint == {}
    with pytest.raises(SystemExit):
        parse_settings(LEADER.split(), {**told, FINGERPRINT_VARIABLE: "6.8"})
    assert f"{FINGERPRINT_VARIABLE} must be a JSON object of strings, not float" in capsys.readouterr().err


def test_a_prefill_engine_says_where_it_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(f"{LEADER} --cell-role prefill")
    assert "--kv-endpoint" in capsys.readouterr().err
    handover = parsed(f"{LEADER} --cell-role prefill --kv-endpoint 10.0.0.1:9 --lease-s 3 --mb-per-token 1").handover
    assert (handover.lease_s, handover.mb_per_token) == (3.0, 1.0)
