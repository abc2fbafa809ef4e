"""Prints the packages of requirements.txt that training needs and that this Python lacks. It imports none of them."""

import importlib.util
import re
import signal
import sys
from pathlib import Path

# Packages that training does not need. A run without a hub, a tracker or pictures can do without those of the second
# line, and the plan and the report say what they lack.
NOT_NEEDED = {"fastapi", "uvicorn", "muon-optimizer", "setuptools", "ruff", "pytest", "pytest-timeout", "pytest-xdist"}
NOT_NEEDED |= {"datasets", "wandb", "matplotlib"} | ({"triton"} if sys.platform != "linux" else set())

signal.signal(signal.SIGINT, signal.SIG_IGN)  # The shell script that runs this program acts on SIGINT.
names = re.findall(r"^[A-Za-z0-9_-]+", (Path(__file__).parent.parent / "requirements.txt").read_text(), re.M)
missing = [n for n in names if n not in NOT_NEEDED and importlib.util.find_spec(n) is None]
print(" ".join(dict.fromkeys(missing)))
