"""A child that never ends by itself: whoever starts it must end it, which is what tests of limits look at."""

import sys

HANGS = (sys.executable, "-c", "import signal; signal.pause()")
