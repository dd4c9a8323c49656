"""CPU cores and hosts that ingresses and cell proxies need for a rate of requests and tokens. Pure arithmetic.

    .venv/bin/python -m bench proxy_hosts --requests-a-day 1e9 --peak 2

A streamed answer costs its request and each of its tokens. The price of a token is the difference between a stream and
a short request, divided by the tokens of the measured streams. Those tokens came 20 ms apart, each in its own packet,
so the price is high: proxies under more load forward several tokens at a time."""

import argparse
import math
from dataclasses import dataclass

DAY_S = 86_400


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


def add_cost_options(parser: argparse.ArgumentParser) -> None:
    """The defaults are those of docs/bench/traffic.md: the ingress with its log, and the cell proxy as the difference
    of the rows with and without it."""
    parser.add_argument("--ingress-requests", type=float, default=0.038, help="CPU s per 1,000 short requests")
    parser.add_argument("--ingress-streams", type=float, default=0.691, help="CPU s per 1,000 streams")
    parser.add_argument("--proxy-requests", type=float, default=0.091, help="CPU s per 1,000 short requests")
    parser.add_argument("--proxy-streams", type=float, default=1.447, help="CPU s per 1,000 streams")
    parser.add_argument("--stream-tokens", type=int, default=16, help="tokens of each measured stream")
    parser.add_argument("--regions", type=int, default=3)
    parser.add_argument("--cores", type=int, default=8, help="of an ingress host")
    parser.add_argument("--utilisation", type=float, default=0.5)


def hosts_text(options: argparse.Namespace, requests_per_s: float, tokens_per_s: float) -> str:
    """Returns the arithmetic with its result, for the options of `add_cost_options`."""
    ingress = PathCost(options.ingress_requests, options.ingress_streams, options.stream_tokens)
    proxy = PathCost(options.proxy_requests, options.proxy_streams, options.stream_tokens)
    plan = HostPlan(options.cores, options.utilisation, options.regions)
    hosts = plan.hosts_per_region(ingress.cores(requests_per_s, tokens_per_s))
    return "\n".join(
        (
            arithmetic("ingress", ingress, requests_per_s, tokens_per_s),
            arithmetic("cell proxies", proxy, requests_per_s, tokens_per_s),
            f"ingress hosts: {hosts} in each of {options.regions} regions, of {options.cores} cores at "
            f"{options.utilisation:.0%}, enough without one region, at least {plan.least}",
        )
    )


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests-a-day", type=float, default=1e9)
    parser.add_argument("--peak", type=float, default=2.0, help="greatest rate of the day to its mean")
    parser.add_argument("--tokens", type=float, default=16.0, help="of an answer, each in a separate packet")
    add_cost_options(parser)
    options = parser.parse_args()
    requests_per_s = options.requests_a_day / DAY_S * options.peak
    print(f"{options.requests_a_day:,.0f} requests a day, {requests_per_s:,.0f}/s at the peak")
    print(hosts_text(options, requests_per_s, requests_per_s * options.tokens))
