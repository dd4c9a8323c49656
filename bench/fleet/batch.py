"""Memory and CPU time of validating a batch file of a million lines.

    .venv/bin/python -m bench batch --lines 1000000

Needs no fleet and no database; the file is made on the disk, in a folder that is deleted again.
"""

import argparse
import json
import os
import resource
import tempfile
from pathlib import Path
from time import perf_counter, process_time

import django

PREFIXES = 60
"""Instructions that lines share, as many as in docs/bench/batch.md."""


def write_lines(path: Path, lines: int, letters: int) -> None:
    shared = [f"You are assistant {number}. " + f"rule {number} " * (letters // 14) for number in range(PREFIXES)]
    with path.open("w", encoding="utf-8") as file:
        for number in range(lines):
            system = {"role": "system", "content": shared[number * 7919 % PREFIXES]}
            user = {"role": "user", "content": f"question {number}: " + "word " * (letters // 10)}
            body = {"model": "sim-70b", "messages": [system, user], "max_tokens": 64}
            line = {"custom_id": f"request-{number:09d}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--letters", type=int, default=400, help="of a prompt")
    parser.add_argument("--folder", type=Path, default=None, help="where the file is made")
    options = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    os.environ.setdefault("SWITCHYARD_SECRET_KEY", "of a measurement")
    django.setup()
    from traffic.planning.batch import BatchSettings
    from traffic.services.batch_validation import file_index, work_write
    from traffic.services.file_folder import FolderStore

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "in.jsonl"
        write_lines(path, options.lines, options.letters)
        before_mib = _peak_mib()
        began, began_cpu = perf_counter(), process_time()
        settings = BatchSettings(max_lines=options.lines)
        with path.open("rb") as file:
            index = file_index(file, "/v1/chat/completions", settings)
            indexed_s = process_time() - began_cpu
            ranges = work_write(FolderStore(Path(folder) / "store"), file, index, "work", settings)
        if index.errors:
            raise SystemExit(f"the file is wrong: {index.errors[0]}")
        print(f"{len(index)} lines, {path.stat().st_size / 2**20:.0f} MiB, {len(ranges)} ranges")
        print(f"validated in {indexed_s:.1f} s of processor, written in {process_time() - began_cpu - indexed_s:.1f} s")
        print(f"{perf_counter() - began:.1f} s in all; {_peak_mib():.0f} MiB at most, {before_mib:.0f} before")


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
