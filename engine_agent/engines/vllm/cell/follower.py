"""The life of a follower: join the leader, build the same worker from the leader's configuration, and do as called.

It has no scheduler, no API and no will of its own; it ends with its leader. `member_health` reports its health.
"""

import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any, NoReturn

import cloudpickle
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from engine_agent.engines.vllm.cell.collectives import join_store, workers_meet_in
from engine_agent.engines.vllm.cell.follower_link import FollowerLink
from engine_agent.engines.vllm.cell.member import CellEnded, Member, secret_from
from engine_agent.engines.vllm.cell.shutdown import Shutdown
from engine_agent.engines.vllm.cell.step import Step, measure_steps, take_step
from engine_agent.engines.vllm.cell.work import Call, Setup, build_follower, cell_token, software
from engine_agent.protocol.fingerprint import fingerprint_from

LEAVING_GRACE_S = 5.0
"""How long a follower that is stopping goes on working for a leader that finishes its streams."""
LEADER_REASON_S = 0.5
"""A leader that ends breaks off its collectives and says why on its connection, in any order: its reason is the one."""
Say = Callable[[str], None]


def follow(member: Member, model_dir: Path, say: Say, shutdown: Shutdown) -> NoReturn:
    """Follow until the cell ends. `say` hears why this member is not ready; an empty text says that it is."""
    secret = secret_from(os.environ)
    link = FollowerLink(member, secret, fingerprint_from(os.environ) | software(), shutdown.end)
    link.on_ready = lambda: _be_ready(member, say)
    shutdown.before_stop = lambda: _leave(link)
    try:
        say(f"looking for the leader at {member.leader_address}:{member.leader_port}")
        setup: Setup = pickle.loads(link.connect(say))  # noqa: S301  (from the leader, which has proved itself)
        link.start()
        say("building the engine")
        worker = _build(setup, member, secret, model_dir)
        say("waiting for the leader to be ready")
        _work(worker, link, setup.vllm_config)
    except CellEnded as error:
        shutdown.end(str(error))
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        sleep(LEADER_REASON_S)
        link.fail(reason)
        shutdown.end(f"{member} failed: {reason}")


def _be_ready(member: Member, say: Say) -> None:
    say("")
    print(f"ready: {member} follows the leader at {member.leader_address}:{member.leader_port}", flush=True)


def _leave(link: FollowerLink) -> None:
    """Go on working while the leader, which is stopping too, finishes its streams."""
    link.announce_leaving()
    if link.ready:
        sleep(LEAVING_GRACE_S)


def _build(setup: Setup, member: Member, secret: bytes, model_dir: Path) -> WorkerWrapperBase:
    token = cell_token(secret, member, setup.nonce)
    store = join_store(member.leader_address, setup.store_port)
    setup.vllm_config.model_config.model = str(model_dir)  # the same weights may lie elsewhere on this node
    return build_follower(setup.vllm_config, member, workers_meet_in(store, token, member.rank, member.size))


def _work(worker: WorkerWrapperBase, link: FollowerLink, vllm_config: Any) -> NoReturn:
    own_steps = measure_steps(vllm_config)
    while True:
        number, payload = link.next_call()
        call: Step | Call = pickle.loads(payload)  # noqa: S301  (from the leader, which has proved itself)
        if isinstance(call, Step):
            take_step(worker, call, own_steps)
        else:
            link.reply(number, _answer(worker, call))
        link.done = number


def _answer(worker: WorkerWrapperBase, call: Call) -> bytes:
    """What the method returned, or the exception that it raised: all ranks have made the call, so the cell goes on."""
    try:
        returned: Any = run_method(worker, call.method, call.args, call.kwargs)
    except Exception as error:
        traceback.print_exc()
        returned = RuntimeError(f"{type(error).__name__}: {error}")
    written: bytes = cloudpickle.dumps(returned)
    return written
