"""The notebook's code runs, and its stored outputs are of this code."""

import json
import pathlib
import re

import numpy as np
import pytest

NOTEBOOK = pathlib.Path(__file__).parents[2] / "examples" / "notebook.ipynb"
# Losses, errors and ranks differ a little: the text is the source of whichever Python this is.
VARYING = re.compile(r"\d+\.\d{3}|\d+ of")


@pytest.mark.slow  # what it calls is tested by itself
def test_runs_and_prints_what_is_stored(capsys):
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    exec("\n\n".join("".join(cell["source"]) for cell in code), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    stored = "".join(line for cell in code for it in cell["outputs"] for line in it.get("text", []))
    assert VARYING.sub("", printed).split() == VARYING.sub("", stored).split()
    losses = [re.findall(r"\b[1-4]\.\d{3}\b", text)[:5] for text in (printed, stored)]
    np.testing.assert_allclose(*np.array(losses, float), atol=0.2)
