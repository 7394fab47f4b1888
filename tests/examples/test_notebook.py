"""The notebook's code runs, and its stored outputs are of this code."""

import json
import pathlib
import re

import pytest

from tests.programs import output_of

ROOT = pathlib.Path(__file__).parents[2]
CELLS = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]
OUTPUTS = [output for cell in CODE for output in cell["outputs"]]


@pytest.mark.slow  # what it calls is tested by itself
def test_runs_and_prints_what_is_stored(tmp_path):
    code = "\n\n".join("".join(cell["source"]) for cell in CODE)
    printed = output_of(code, tmp_path, MPLBACKEND="agg")
    stored = "".join("".join(output.get("text", [])) for output in OUTPUTS)
    assert sizes(printed) == sizes(stored)
    assert len(printed.splitlines()) == len(stored.splitlines())
    # Losses differ a little: the text is the source of whichever Python this is.
    for found, kept in zip(losses(printed), losses(stored), strict=True):
        assert abs(found - kept) < 0.2


def sizes(printed):
    """Names and bytes of the state, and of the factors."""
    return re.findall(r"^([a-z]\S+|\[\S+).* ([\d,]{6,})", printed, re.MULTILINE)


def losses(printed):
    return [float(loss) for loss in re.findall(r"\b([1-4]\.\d{3})\b", printed)][:5]
