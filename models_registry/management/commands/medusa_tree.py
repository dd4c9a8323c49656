"""`manage.py medusa_tree`: reads a calibration's accuracies, writes the tree that accepts most. Touches no database."""

import json
import sys
from argparse import RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from engine_agent.protocol.strict_json import strict_loads
from models_registry.planning.medusa_tree import BadTree, build_tree, check_tree

EXAMPLE = """
Input, one list for each Medusa head, best guess first; each number is the share of calibration tokens at which the
guess of this rank alone was right:

    {"accuracies": [[0.61, 0.14, 0.06], [0.38, 0.13, 0.07], [0.25, 0.1, 0.06]]}

Output, the `tree` of a model version's speculation {"method": "medusa", "heads": 3, "tree": …}:

    [[0], [0, 0], [0, 0, 0], [1]]
"""


class Command(BaseCommand):
    help = "Build the sparse Medusa tree with the longest expected accepted length." + EXAMPLE
    requires_system_checks = []
    requires_migrations_checks = False

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """The parser, with the example's lines kept as they are."""
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        parser.formatter_class = RawDescriptionHelpFormatter
        return parser

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the input, size, depth and output."""
        parser.add_argument("accuracies", help="JSON file with the accuracies; - reads standard input")
        parser.add_argument(
            "--size", type=int, default=63, help="paths in the tree (63, a step then verifies 64 tokens)"
        )
        parser.add_argument("--depth", type=int, help="longest path (the number of heads)")
        parser.add_argument("--output", type=Path, help="file to write the tree to (standard output)")

    def handle(self, *args: Any, **options: Any) -> None:
        """Build, check and write the tree.

        Raises:
            CommandError: the input is no accuracies, or the tree asked for cannot be had.
        """
        accuracies = _accuracies(options["accuracies"])
        depth = options["depth"] or len(accuracies)
        try:
            tree = build_tree(accuracies, size=options["size"], depth=depth)
            check_tree(tree.as_json(), heads=len(accuracies), top_k=max(map(len, accuracies)))
        except BadTree as error:
            raise CommandError(str(error)) from error
        text = json.dumps(tree.as_json()) + "\n"
        if options["output"] is None:
            self.stdout.write(text, ending="")
        else:
            options["output"].write_text(text)
        self.stderr.write(
            f"{len(tree.paths)} paths on {len(accuracies)} heads, longest {max(map(len, tree.paths))}: "
            f"{1 + tree.expected_accepted:.2f} tokens a step expected, medusa_speculation_length {len(tree.paths) + 1}"
        )


def _accuracies(name: str) -> tuple[tuple[float, ...], ...]:
    try:
        stated: Any = strict_loads(sys.stdin.read() if name == "-" else Path(name).read_text())
        heads = stated["accuracies"] if isinstance(stated, dict) else stated
        return tuple(tuple(float(share) for share in head) for head in heads)
    except OSError as error:
        raise CommandError(f"cannot read {name}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f'{name} is no calibration ({error!r}); it must be {{"accuracies": [[0.6, 0.1], [0.4, 0.1]]}}'
        ) from error
