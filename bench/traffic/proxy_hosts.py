"""CPU cores and hosts that ingresses and cell proxies need for a rate of requests and tokens. Pure arithmetic.

A streamed answer costs its request and each of its tokens. The price of a token is the difference between a stream and
a short request, divided by the tokens of the measured streams. Those tokens came 20 ms apart, each in its own packet,
so the price is high: proxies under more load forward several tokens at a time."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PathCost:
    """CPU seconds of one part of the path, as `bench proxies` measures them: for 1,000 short requests, and for 1,000
    streams of `stream_tokens` tokens."""

    requests_s: float
    streams_s: float
    stream_tokens: int = 16

    @property
    def request_s(self) -> float:
        return self.requests_s / 1000

    @property
    def token_s(self) -> float:
        return (self.streams_s - self.requests_s) / 1000 / self.stream_tokens

    def cores(self, requests_per_s: float, tokens_per_s: float) -> float:
        return requests_per_s * self.request_s + tokens_per_s * self.token_s


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Ingress hosts of each region, so that the others carry everything without one region, at most at `utilisation`,
    and with at least `least` hosts each."""

    cores_per_host: int
    utilisation: float
    regions: int
    least: int = 2

    def hosts_per_region(self, cores: float) -> int:
        carrying = max(1, self.regions - 1)
        return max(self.least, math.ceil(cores / carrying / (self.cores_per_host * self.utilisation)))


def arithmetic(name: str, cost: PathCost, requests_per_s: float, tokens_per_s: float) -> str:
    """Returns the calculation in one line, with its inputs."""
    return (
        f"{name}: {requests_per_s:,.0f} requests/s x {cost.request_s * 1e6:.0f} us + {tokens_per_s:,.0f} tokens/s x "
        f"({cost.streams_s:g} - {cost.requests_s:g}) s / 1,000 / {cost.stream_tokens} = {cost.token_s * 1e6:.1f} us "
        f"= {cost.cores(requests_per_s, tokens_per_s):.2f} cores"
    )
