"""What boto3 costs the process that looks after clouds: memory and processor time, with a region of AWS and without.

    .venv/bin/python -m bench.cloud_memory [--rounds 5]

Each line is a process of its own: Django and all of `fleet`'s services as the controller has them; then with the first
client of EC2; then with those of all services that the provider calls, in three regions. It needs no server and no
account.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVICES = ("ec2", "sqs", "s3", "elbv2", "cloudformation", "route53", "cloudwatch", "iam", "sts")
CASES = {"no region of aws": (0, 0), "a client of EC2": (1, 1), "all services": (len(SERVICES), 1)}
CASES["all services, three regions"] = (len(SERVICES), 3)
PROGRAM = """
import json, os, resource, sys, time
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
os.environ.setdefault("SWITCHYARD_SECRET_KEY", "of-a-bench-that-signs-nothing-0123456789-abcdefghijklmnop")
os.environ.update(AWS_ACCESS_KEY_ID="none", AWS_SECRET_ACCESS_KEY="none")
import django
django.setup()
import fleet.tasks, traffic.tasks
from fleet.providers.aws import calls
services, regions = json.loads(sys.argv[1])
assert "boto3" not in sys.modules and "botocore" not in sys.modules
began = time.process_time()
for region in ("us-east-1", "us-west-2", "eu-west-1")[:regions]:
    for service in services:
        calls.client(service, region, once=False)
took = time.process_time() - began
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({"rss": int(status["VmRSS"].split()[0]) / 1024, "took": took}))
"""


def measured(services: int, regions: int) -> dict[str, float]:
    """Resident MiB of such a process, and the processor seconds that its clients took."""
    asked = json.dumps([SERVICES[:services], regions])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, asked], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print("| process | resident MiB | more than without | CPU s of the clients |")
    print("| --- | ---: | ---: | ---: |")
    without = None
    for name, (services, regions) in CASES.items():
        rounds = [measured(services, regions) for _ in range(args.rounds)]
        rss = statistics.median(each["rss"] for each in rounds)
        took = statistics.median(each["took"] for each in rounds)
        without = rss if without is None else without
        print(f"| {name} | {rss:.0f} | {rss - without:.0f} | {took:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
