"""Runs a command with the default action of SIGINT, for example python3 dev/interruptible.py bash script.sh.

A shell cannot restore the default action itself if it was started with SIGINT ignored.
"""

import os
import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
