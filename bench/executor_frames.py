"""What a decode step weighs on the wire as the batch grows, and what writing and reading it costs.

    PYTHONPATH=. .cache/engines/vllm-cpu/bin/python bench/executor_frames.py

Run by the engine's Python. It makes the scheduler's output for steps of 1 to 256 sequences, one of which in 16 has just
got a new block of the KV cache.
"""

import pickle
import statistics
import time

from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from engine_agent.engines.vllm.cell.frames import FIRST_FRAME_BYTES, FrameReader, FrameWriter
from engine_agent.engines.vllm.cell.work import Step

KEY = b"k" * 32
ROUNDS = 300


def decode_step(sequences: int) -> Step:
    """A step in which every sequence gets its next token. Ids are as long as the API's."""
    ids = [f"cmpl-{index:032x}-0" for index in range(sequences)]
    cached = CachedRequestData(
        req_ids=ids,
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[([index],) if index % 16 == 0 else None for index in range(sequences)],
        num_computed_tokens=[100 + index for index in range(sequences)],
        num_output_tokens=[50 + index for index in range(sequences)],
    )
    output = SchedulerOutput.make_empty()
    output.scheduled_cached_reqs = cached
    output.num_scheduled_tokens = dict.fromkeys(ids, 1)
    output.total_num_scheduled_tokens = sequences
    return Step(output, None)


def cost_us(step: Step) -> tuple[int, float, float]:
    """Bytes of the call, and microseconds that the leader's and a follower's side take of a core, medians."""
    writer, reader, leader, follower = FrameWriter(KEY), FrameReader(KEY), list[float](), list[float]()
    call = b""
    for _ in range(ROUNDS):
        began = time.perf_counter()
        call = pickle.dumps(step, pickle.HIGHEST_PROTOCOL)
        second = writer.write(call)
        sent = time.perf_counter()
        reader.first[:] = writer.first
        reader.second_frame_bytes()
        pickle.loads(reader.call(second))  # noqa: S301  (written above)
        leader.append(sent - began)
        follower.append(time.perf_counter() - sent)
    return len(call), statistics.median(leader) * 1e6, statistics.median(follower) * 1e6


def main() -> None:
    """Print the table."""
    print("| sequences | bytes | broadcasts | leader µs | follower µs |\n| --- | --- | --- | --- | --- |")
    for sequences in (1, 4, 16, 64, 256):
        size, leader_us, follower_us = cost_us(decode_step(sequences))
        frames = 1 if size <= FIRST_FRAME_BYTES - 28 else 2
        print(f"| {sequences} | {size} | {frames} | {leader_us:.0f} | {follower_us:.0f} |")


if __name__ == "__main__":
    main()
