"""examples/nvfp4_in_ten_minutes.ipynb: what is stored is whole and of no machine; executed with nbclient (slow)."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "nvfp4_in_ten_minutes.ipynb"


def test_the_stored_outputs_are_whole():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error"]
    assert len([o for o in outputs if "image/png" in o.get("data", {})]) == 2
    text = "".join("".join(o.get("text", [])) + "".join(o.get("data", {}).get("text/plain", [])) for o in outputs)
    assert "decoded" in text and "model.safetensors" in text
    assert "converted 14 linear layers" in text and "plain model" not in text  # with transformers
    assert not re.search(r"/(home|root|tmp|work|usr|opt|Users)/", text)
    assert "colab.research.google.com/github/" in "".join(cells[0]["source"])


@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch):
    for package in ("nbclient", "nbformat", "ipykernel"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package} (pip install nbclient ipykernel)")
    import nbclient
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    root = NOTEBOOK.parent.parent
    monkeypatch.setenv("PYTHONPATH", f"{root}:{root / 'kernels'}")
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    stored = nbformat.read(NOTEBOOK, as_version=4)

    def printed(nb, part: str) -> str:
        cell = next(c for c in nb.cells if part in c.source and c.cell_type == "code")
        return "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout")

    assert printed(notebook, "tensor_scale") == printed(stored, "tensor_scale")
    first, *_, last = map(float, re.findall(r"loss ([\d.]+)", printed(notebook, "nf.convert")))
    assert last < first / 2
    first, *_, last = map(float, re.findall(r"val_bpb ([\d.]+)", printed(notebook, "base_train")))
    assert last < 0.9 * first
    assert "modeling_nanochat_fp4.py" in printed(notebook, '"export"') and printed(notebook, "chat_cli").strip()
