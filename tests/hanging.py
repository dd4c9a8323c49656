"""A child process that never exits, for tests of time limits."""

import sys

HANGS = (sys.executable, "-c", "import signal; signal.pause()")
