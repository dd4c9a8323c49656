"""vLLM's executors, given to it by name with `--distributed-executor-backend`: `OneProcessExecutor` measures decode
steps, `LeaderFollowerExecutor` leads a cell. In a cell vLLM runs its scheduler and first worker as on one node. Every
call of the worker is sent to the followers and to this node's other workers first, so that all ranks make the same
calls in the same order. One step is one message. Nothing is retried, and no cell continues with fewer members: any
failure ends the cell with its reason."""

import os
import pickle
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from time import sleep
from typing import Any

import cloudpickle
import torch
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.serial_utils import run_method

from engine_agent.engines.vllm import vllm_versions
from engine_agent.engines.vllm.cell.leader_link import LeaderLink
from engine_agent.engines.vllm.cell.local_workers import CAUSE_FIRST_S, LocalWorkers
from engine_agent.engines.vllm.cell.member import (
    CellEnded,
    Shutdown,
    certificate_from,
    member_from,
    read_end_reason,
    secret_from,
    write_end_reason,
)
from engine_agent.engines.vllm.cell.worker import (
    Call,
    Setup,
    cell_token,
    host_store,
    output_rank,
    place_worker,
    ranks_share_memory,
    remove_shared_memory,
    software,
    start_local_workers,
    workers_meet_in,
    workers_per_node,
)
from engine_agent.engines.vllm.continuation.core import patch_core
from engine_agent.engines.vllm.steps import (
    OwnSteps,
    Step,
    decode_sequences,
    in_one_order,
    measure_steps,
    runtime_folder,
    take_step,
)
from engine_agent.protocol.fingerprint import fingerprint_from


class OneProcessExecutor(UniProcExecutor):  # type: ignore[misc]  # no types
    """A worker in the engine's core; its steps are measured on CPU."""

    def _init_executor(self) -> None:
        vllm_versions.adjust_torch(torch)
        patch_core()
        self._steps = OwnSteps(runtime_folder()) if current_platform.is_cpu() else None
        self._sequences, self._spent_s = 0, 0.0
        super()._init_executor()

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """See vLLM's. A step that will be sampled continues in `sample_tokens`."""
        if self._steps is None:
            return super().execute_model(scheduler_output, *args, **kwargs)
        began_s = self._steps.now_s()
        output = super().execute_model(scheduler_output, *args, **kwargs)
        self._sequences, self._spent_s = decode_sequences(scheduler_output), self._steps.now_s() - began_s
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        if self._steps is None:
            return super().sample_tokens(*args, **kwargs)
        began_s = self._steps.now_s()
        output = super().sample_tokens(*args, **kwargs)
        if self._sequences:
            self._steps.note(self._sequences, self._spent_s + self._steps.now_s() - began_s)
        self._sequences = 0
        return output


class LeaderFollowerExecutor(UniProcExecutor):  # type: ignore[misc]  # no types
    """Rank 0's worker, this node's other workers, and the link to all followers."""

    supports_pp = True

    def _init_executor(self) -> None:
        vllm_versions.adjust_torch(torch)
        patch_core()
        self._held: Any = None
        self._link: LeaderLink | None = None
        self._local: LocalWorkers | None = None
        self._member = member_from(os.environ)
        self._process_shutdown = Shutdown()
        self._process_shutdown.hooks.append(lambda reason: write_end_reason(self._member, reason))
        try:
            self._start_local_workers()
            super()._init_executor()
            self._own_steps = measure_steps(self.vllm_config)
        except CellEnded as error:
            self._process_shutdown.end(str(error))
        except Exception as error:
            self._blame(error, "building its engine")
            raise

    def _start_local_workers(self) -> None:
        member, config, end = self._member, self.vllm_config, self._process_shutdown.end
        self._shares = ranks_share_memory(config, member)
        self._output_node = output_rank(config) // workers_per_node(config, member)
        local = start_local_workers(
            config,
            member,
            secret_from(os.environ),
            Path(config.model_config.model),
            lambda reason: end(f"{member} failed: {reason}"),
        )
        self._process_shutdown.hooks.insert(0, lambda _: local.close())
        self._local = local

    def _distributed_args(self) -> tuple[str, int, int]:
        """Waits for the followers and publishes the configuration; then the worker may be built."""
        member, secret, certificate = self._member, secret_from(os.environ), certificate_from(os.environ)
        fingerprint = fingerprint_from(os.environ) | software()
        link = LeaderLink(member, secret, certificate, fingerprint, self._process_shutdown.end)
        self._process_shutdown.hooks.append(lambda reason: link.close(reason, failed=True))
        rank = place_worker(self.vllm_config, member)
        link.gather()
        store, nonce = host_store(member.address), secrets.token_hex(16)
        setup = cloudpickle.dumps(Setup(self.vllm_config, store.port, nonce))
        link.publish(setup)
        self._locals().send(setup)
        link.finished = self._locals().finished
        token = cell_token(secret, member, nonce)
        self._process_shutdown.hooks.append(lambda _: remove_shared_memory(token))
        self._link, self._token = link, token
        return workers_meet_in(store, token, member.rank, shares=self._shares), rank, 0

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        """The last call before vLLM serves, in versions whose executors have no warm-up method."""
        super().initialize_from_config(kv_cache_configs)
        if not vllm_versions.warms_up_by_method(UniProcExecutor):
            self._be_ready()

    def compile_or_warm_up_model(self) -> None:
        """The last call before vLLM serves, in other versions."""
        super().compile_or_warm_up_model()
        self._be_ready()

    def _be_ready(self) -> None:
        if vllm_versions.has_dummy_batch(self.driver_worker):
            self.collective_rpc("execute_dummy_batch")  # a first step may compile, and later steps are timed
        remove_shared_memory(self._token)
        self._joined().start_watching()

    # --- one step, one message ----------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Keeps a step that will be sampled: `sample_tokens` always follows, and both are sent as one call."""
        if scheduler_output.total_num_scheduled_tokens == 0 or self.model_config.runner_type != "generate":
            return self._take_step(Step(scheduler_output, None), non_block)
        self._held = scheduler_output
        return _done(None) if non_block else None

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        held, self._held = self._held, None
        return self._take_step(Step(held, grammar_output), non_block)

    def take_draft_token_ids(self) -> Any:
        """Every rank drafted the same tokens in its step, so the followers are not called."""
        return self.driver_worker.take_draft_token_ids()

    def _take_step(self, step: Step, non_block: bool) -> Any:
        link = self._joined()
        in_one_order(step.scheduler_output)
        number = self._send(pickle.dumps(step, pickle.HIGHEST_PROTOCOL))
        link.step_called(number)
        try:
            output = take_step(self.driver_worker, step, self._own_steps)
        except Exception as error:
            self._blame(error, f"step {number}")
            raise
        if self._output_node > 0:
            link.step_finished(number)
            reading = _Awaited(lambda: pickle.loads(link.reply(self._output_node, number)))  # noqa: S301
            return reading if non_block else reading.result()
        if not isinstance(output, AsyncModelRunnerOutput):
            link.step_finished(number)
            return _done(output) if non_block else output
        finishing = _Awaited(output.get_output, lambda: link.step_finished(number))
        return finishing if non_block else finishing.result()

    # --- any other call -----------------------------------------------------------------------------------------------

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """Calls a method of every rank's worker; returns the results in the order of ranks."""
        sent = method if isinstance(method, str) else cloudpickle.dumps(method)
        number = self._send(cloudpickle.dumps(Call(sent, args, kwargs or {})))
        try:
            own: Any = run_method(self.driver_worker, method, args, kwargs or {})
        finally:
            replies = self._locals().replies(number)
            for node in self._joined().replies(number, timeout):
                replies += pickle.loads(node)  # noqa: S301  (from authenticated members)
        theirs = [pickle.loads(reply) for reply in replies]  # noqa: S301
        for reply in theirs:
            if isinstance(reply, Exception):
                raise reply
        returned = own if single_value else [own, *theirs]
        return _done(returned) if non_block else returned

    def init_kv_output_aggregator(self, connector: Any) -> None:
        """Refuses: the output of the followers' connectors would be lost."""
        self._process_shutdown.end("a cell of several nodes cannot use a KV connector: remove --kv-transfer-config")

    # --- the end ------------------------------------------------------------------------------------------------------

    def check_health(self) -> None:
        """Does nothing: an unhealthy cell has ended, and this process with it."""

    def shutdown(self) -> None:
        """Ends the cell, on purpose or because this rank cannot continue."""
        if self._link is not None:
            reason = read_end_reason(self._member.ended_file)
            self._link.close(reason or "the leader is stopping", failed=bool(reason))
        if self._local is not None:
            self._local.close()
        super().shutdown()

    def _send(self, call: bytes) -> int:
        try:
            number = self._joined().call(call)
        except ValueError as error:
            self._blame(error, "calling its followers")
            raise
        self._locals().call(number, call)
        return number

    def _blame(self, error: Exception, doing: str) -> None:
        """Records this rank as the cause, unless another rank's death turns out to be."""
        if self._link is not None:
            sleep(CAUSE_FIRST_S)
        write_end_reason(self._member, f"{self._member} failed in {doing}: {type(error).__name__}: {error}")

    def _joined(self) -> LeaderLink:
        if self._link is None:
            raise CellEnded("the cell has not formed")
        return self._link

    def _locals(self) -> LocalWorkers:
        if self._local is None:
            raise CellEnded("the workers of this node have not started")
        return self._local


class _Awaited(Future[Any]):
    """A step's output that a device or the last pipeline stage still computes; `finished` is called when it is read.
    Like vLLM's AsyncOutputFuture, which versions before May 2026 lack."""

    def __init__(self, read: Callable[[], Any], finished: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._read, self._finished = read, finished

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the output; vLLM passes no timeout here."""
        if not self.done():
            try:
                self.set_result(self._read())
            except Exception as error:
                self.set_exception(error)
        output = super().result(timeout)
        self._finished()
        return output


def _done(result: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(result)
    return future
