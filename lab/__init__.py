"""The laboratory: what measures, studies and predicts. The wheel does not contain it.

measure times kernels, layers and steps. study trains many models and compares them. predict compares this project's
model of a GPU with published times. golden proves that a change of the code changes no result.
lab may import everything, and nothing imports lab. `python -m lab.reproduce list` names the paper's tables and figures.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # of the repository
RESULTS = ROOT / "lab/results"
