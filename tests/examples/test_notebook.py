"""The notebook's code runs, and its stored outputs are of this code."""

import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
CELLS = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]
OUTPUTS = [output for cell in CODE for output in cell["outputs"]]


def test_runs_and_prints_what_is_stored(tmp_path):
    program = tmp_path / "notebook.py"
    program.write_text("\n\n".join("".join(cell["source"]) for cell in CODE))
    settings = {"JAX_PLATFORMS": "cpu", "MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    stored = "".join("".join(output.get("text", [])) for output in OUTPUTS)
    assert sizes(done.stdout) == sizes(stored)
    assert len(done.stdout.splitlines()) == len(stored.splitlines())
    # Losses differ a little: the text is the source of whichever Python this is.
    for found, kept in zip(losses(done.stdout), losses(stored), strict=True):
        assert abs(found - kept) < 0.2


def sizes(printed):
    """Names and bytes of the state, and of the factors."""
    return re.findall(r"^([a-z]\S+|\[\S+).* ([\d,]{6,})", printed, re.MULTILINE)


def losses(printed):
    return [float(loss) for loss in re.findall(r"\b([1-4]\.\d{3})\b", printed)][:5]


def test_outputs_are_small_and_pictures_are_described():
    assert (ROOT / "examples" / "notebook.ipynb").stat().st_size < 100_000
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    for cell in CODE:
        if any("image/png" in output.get("data", {}) for output in cell["outputs"]):
            assert cell["metadata"]["alt"]
