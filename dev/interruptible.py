"""Runs a command with SIGINT at its default: python3 dev/interruptible.py bash script.sh. A shell cannot do that."""

import os
import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
