"""Views for the region autopilot, and a small closed loop around it on a virtual clock."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from traffic.region_shares.planning.autopilot import (
    AutopilotSettings,
    Decision,
    KeepTable,
    RegionView,
    ShiftTraffic,
    TrafficView,
    placement_problem,
    plan_shift,
)
from traffic.region_shares.planning.load import (
    Sample,
    arrivals_to_expect,
    capacity_to_count_on,
    has_returned,
    is_starting,
    recent_samples,
    share_lost,
)
from traffic.region_shares.planning.placement import latencies_ms
from traffic.region_shares.planning.policy import Matrix, OverrideView, TrafficPolicy, distance, loads, overrides_for

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
SETTINGS = AutopilotSettings()
NAMES = ("a", "b", "c", "d")
MS = {"a:b": 10.0, "a:c": 30.0, "a:d": 90.0, "b:c": 20.0, "b:d": 80.0, "c:d": 70.0}
TICK_S = 2.0


def region(
    name: str,
    demand: float,
    capacity: float,
    *,
    now: float | None = None,
    lost: float = 0.0,
    heard_s_ago: float | None = 1.0,
    starting: bool = False,
    returned: bool = False,
) -> RegionView:
    """`now` is the current capacity, if it exceeds the conservative one."""
    heard = None if heard_s_ago is None else NOW - timedelta(seconds=heard_s_ago)
    return RegionView(name, demand, capacity, capacity if now is None else now, lost, heard, starting, returned)


def view(
    *regions: RegionView,
    in_force: Matrix | None = None,
    moved_s_ago: float = 3600.0,
    policy: TrafficPolicy | None = None,
    overrides: tuple[OverrideView, ...] = (),
) -> TrafficView:
    """Without `in_force`, every origin is served at home."""
    names = [one.name for one in regions]
    return TrafficView(
        deployment="llama",
        regions=regions,
        in_force={name: {name: 1.0} for name in names} if in_force is None else in_force,
        moved_at=NOW - timedelta(seconds=moved_s_ago),
        policy=policy or TrafficPolicy(),
        overrides=overrides,
        latency_ms=latencies_ms(names, MS),
    )


def decide(seen: TrafficView, now: datetime = NOW) -> Decision | None:
    return plan_shift(seen, SETTINGS, now)


def shifted(seen: TrafficView) -> ShiftTraffic:
    decision = decide(seen)
    assert isinstance(decision, ShiftTraffic), decision
    return decision


def utilisations(seen: TrafficView, matrix: Matrix) -> dict[str, float]:
    task = placement_problem(seen, overrides_for(seen.deployment, seen.overrides, NOW))
    carried = loads(matrix, task.demand)
    return {
        one.name: carried.get(one.name, 0.0) / one.capacity_now if one.capacity_now else float("inf")
        for one in seen.regions
        if one.capacity_now or carried.get(one.name, 0.0) > 0.01
    }


@dataclass
class ClosedLoop:
    """A deployment over time: capacity and demand are functions of seconds; the autopilot runs every two seconds."""

    capacity: Callable[[str, float], float]
    demand: Callable[[str, float], float]
    names: tuple[str, ...] = NAMES[:2]
    policy: TrafficPolicy = field(default_factory=TrafficPolicy)
    overrides: tuple[OverrideView, ...] = ()
    silent: Callable[[str, float], bool] = lambda name, at_s: False

    def __post_init__(self) -> None:
        self.matrix: Matrix = {name: {name: 1.0} for name in self.names}
        self.moved_at: datetime | None = None
        self.at_s = 0.0
        self.moves: list[tuple[float, ShiftTraffic, float]] = []
        self.holds: list[tuple[float, str]] = []
        self._samples: dict[str, deque[Sample]] = {name: deque() for name in self.names}
        self._heard: dict[str, float] = dict.fromkeys(self.names, 0.0)

    def run(self, until_s: float) -> "ClosedLoop":
        while self.at_s < until_s:
            self.tick()
        return self

    def tick(self) -> None:
        now = NOW + timedelta(seconds=self.at_s)
        decision = plan_shift(self._view(now), SETTINGS, now)
        if isinstance(decision, KeepTable):
            self.holds.append((self.at_s, decision.reason))
        elif decision is not None:
            greatest = max(distance(self.matrix[name], row) for name, row in decision.matrix.items())
            self.moves.append((self.at_s, decision, greatest))
            self.matrix, self.moved_at = decision.matrix, now
        self.at_s += TICK_S

    def utilisation(self, name: str) -> float:
        demand = {each: self.demand(each, self.at_s) for each in self.names}
        return loads(self.matrix, demand).get(name, 0.0) / max(self.capacity(name, self.at_s), 1e-9)

    def movement(self, since_s: float = 0.0) -> float:
        """Total variation of the row that moved most, summed over all shifts."""
        return sum(greatest for at_s, _, greatest in self.moves if at_s >= since_s)

    def _view(self, now: datetime) -> TrafficView:
        regions = []
        for name in self.names:
            at = now.timestamp()
            if not self.silent(name, self.at_s):
                self._heard[name] = self.at_s
                sample = Sample(at, self.demand(name, self.at_s), 0.0, self.capacity(name, self.at_s))
                self._samples[name] = deque(recent_samples((*self._samples[name], sample), at))
            samples = tuple(self._samples[name])
            regions.append(
                RegionView(
                    name=name,
                    demand=arrivals_to_expect(samples),  # each takes one second, so arrivals equal concurrent requests
                    capacity=capacity_to_count_on(samples, at),
                    capacity_now=samples[-1].capacity,
                    share_lost=share_lost(samples, at),
                    reported_at=NOW + timedelta(seconds=self._heard[name]),
                    starting=is_starting(samples, at),
                    returned=has_returned(samples),
                )
            )
        return TrafficView(
            deployment="llama",
            regions=tuple(regions),
            in_force=self.matrix,
            moved_at=self.moved_at,
            policy=self.policy,
            overrides=self.overrides,
            latency_ms=latencies_ms(self.names, MS),
        )


def constant(values: Mapping[str, float]) -> Callable[[str, float], float]:
    return lambda name, at_s: values[name]
