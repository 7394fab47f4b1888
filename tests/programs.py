"""Programs that documents show, run as their readers run them."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def output_of(code, folder, name="program", **settings):
    """What a program prints that runs in a folder, with settings of its environment."""
    program = folder / "program.py"
    program.write_text(code)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **settings}
    done = subprocess.run(
        [sys.executable, program], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{name}: {done.stderr}"
    return done.stdout
