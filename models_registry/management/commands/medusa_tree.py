"""`manage.py medusa_tree`: reads a calibration and writes the Medusa tree with the most accepted tokens. It never reads
or writes the database."""

import json
import sys
from argparse import RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from engine_agent.protocol.strict_json import strict_loads
from models_registry.speculation.planner import MOST_PATHS, BadCalibration, most_probable, path_counts, read_calibration
from models_registry.versions.planning.speculation import Accuracies, BadTree, MedusaTree, build_tree, check_tree

EXAMPLE = """
Input, one list for each Medusa head, best guess first; each number is the share of calibration tokens at which the
guess of this rank alone was right:

    {"accuracies": [[0.61, 0.14, 0.06], [0.38, 0.13, 0.07], [0.25, 0.1, 0.06]]}

Output, the `tree` of a model version's speculation {"method": "medusa", "heads": 3, "tree": …}:

    [[0], [0, 0], [0, 0, 0], [1]]

Better than accuracies is the calibration.json that the trainer of heads writes: it has whole paths, and heads are not
independent of each other. --task then names one of its tasks.
"""


class Command(BaseCommand):
    help = "Build the sparse Medusa tree with the highest expected number of accepted tokens." + EXAMPLE
    requires_system_checks = []
    requires_migrations_checks = False

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """The parser, which keeps the line breaks of the example."""
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        parser.formatter_class = RawDescriptionHelpFormatter
        return parser

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("accuracies", help="JSON file with accuracies or a calibration; - reads standard input")
        parser.add_argument("--task", default="", help="task of the calibration (default: its first)")
        parser.add_argument(
            "--size",
            type=int,
            default=63,
            help="number of paths in the tree (default: 63; a step then verifies 64 tokens)",
        )
        parser.add_argument("--depth", type=int, help="longest path (default: the number of heads)")
        parser.add_argument("--output", type=Path, help="output file (default: standard output)")

    def handle(self, *args: Any, **options: Any) -> None:
        """Build, check and write the tree. Raises CommandError if the input has no accuracies, or the requested tree is
        impossible."""
        stated = _stated(options["accuracies"])
        if isinstance(stated, dict) and "tasks" in stated:
            tree, heads = _of_calibration(stated, options)
        else:
            tree, heads = _of_accuracies(_accuracies(options["accuracies"], stated), options)
        text = json.dumps(tree.as_json()) + "\n"
        if options["output"] is None:
            self.stdout.write(text, ending="")
        else:
            options["output"].write_text(text)
        self.stderr.write(
            f"{len(tree.paths)} paths on {heads} heads, longest {max(map(len, tree.paths))}: "
            f"{1 + tree.expected_accepted:.2f} tokens per step expected, medusa_speculation_length "
            f"{len(tree.paths) + 1}"
        )


def _of_accuracies(accuracies: Accuracies, options: dict[str, Any]) -> tuple[MedusaTree, int]:
    try:
        tree = build_tree(accuracies, size=options["size"], depth=options["depth"] or len(accuracies))
        check_tree(tree.as_json(), heads=len(accuracies), top_k=max(map(len, accuracies)))
    except BadTree as error:
        raise CommandError(str(error)) from error
    return tree, len(accuracies)


def _of_calibration(stated: dict[str, Any], options: dict[str, Any]) -> tuple[MedusaTree, int]:
    try:
        read = read_calibration(stated)
    except BadCalibration as error:
        raise CommandError(str(error)) from error
    tasks = {task.name: task for task in read.tasks}
    task = tasks.get(options["task"] or read.tasks[0].name)
    if task is None:
        raise CommandError(f"--task is {options['task']!r}; the calibration has {', '.join(tasks)}")
    if options["size"] < 1:
        raise CommandError(f"size is {options['size']}; it must be a whole number from 1")
    depth = options["depth"] or read.heads
    counts = {path: each for path, each in path_counts(task.paths()).items() if len(path) <= depth}
    paths = most_probable(counts, min(options["size"], MOST_PATHS))
    if not paths:
        raise CommandError(f"no guess of task {task.name} was right at depth {depth}, so there is no tree")
    return MedusaTree(paths, sum(counts[path] for path in paths) / task.positions), read.heads


def _stated(name: str) -> Any:
    try:
        return strict_loads(sys.stdin.read() if name == "-" else Path(name).read_text())
    except OSError as error:
        raise CommandError(f"cannot read {name}: {error.strerror}") from error
    except ValueError as error:
        raise CommandError(f"{name} is not a calibration ({error})") from error


def _accuracies(name: str, stated: Any) -> Accuracies:
    try:
        heads = stated["accuracies"] if isinstance(stated, dict) else stated
        return tuple(tuple(float(share) for share in head) for head in heads)
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f'{name} is not a calibration ({error!r}); it must be {{"accuracies": [[0.6, 0.1], [0.4, 0.1]]}}'
        ) from error
