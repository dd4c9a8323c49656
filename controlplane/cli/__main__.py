"""`python -m controlplane.cli`, which `.venv/bin/switchyard` runs."""

import sys

from controlplane.cli.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
