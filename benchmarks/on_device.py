"""All figures of one accelerator in ten minutes: `make on-device`, or this module.

Runs `benchmarks.update_speed` part by part, the most telling first, each in a process of its own:
the update and the whole training step, at 117M and 345M. A part for which no time is left is named
and left out; what was measured stays. Results go to `results/speed/`, a file each.
"""

import dataclasses
import pathlib
import subprocess
import sys
import time
from typing import Literal

import tyro

from benchmarks.accelerator import require_accelerator
from benchmarks.record_files import name_of_device

RESULTS = pathlib.Path(__file__).parents[1] / "results" / "speed"
_MANY = ("adamw", "adafactor", "adapprox", "adapprox rank 16", "muon", "adapprox_muon")
_FEW = ("adamw", "adafactor", "adapprox", "muon")


@dataclasses.dataclass(frozen=True)
class Part:
    """One call of `benchmarks.update_speed`."""

    model: Literal["tiny", "117M", "345M"]
    contenders: tuple[str, ...]
    options: tuple[str, ...]

    def command(self, output: pathlib.Path) -> list[str]:
        """The command line."""
        start = [sys.executable, "-m", "benchmarks.update_speed", "--models", self.model]
        return [*start, "--contenders", *self.contenders, *self.options, "--output", str(output)]

    @property
    def name(self) -> str:
        """What it measures, as a file may be called."""
        what = "training_step" if "--training-step" in self.options else "update"
        return f"{what}_{self.model}"


PARTS = (
    Part("117M", _MANY, ("--in-place",)),
    Part("117M", _FEW, ("--training-step", "--batch", "32", "--cycles", "3")),
    Part("345M", _FEW, ("--in-place", "--cycles", "3")),
    Part("345M", _FEW, ("--training-step", "--batch", "16", "--cycles", "3")),
)


def run_parts(parts: tuple[Part, ...], seconds: float, folder: pathlib.Path, kind: str) -> int:
    """Runs parts until the time is up, and returns how many are not done."""
    end, missing = time.monotonic() + seconds, []
    for part in parts:
        output = folder / f"{part.name}_{kind}.json"
        output.unlink(missing_ok=True)  # of an earlier run
        left = end - time.monotonic()
        try:
            done = left > 0 and not subprocess.run(part.command(output), timeout=left).returncode
        except subprocess.TimeoutExpired:
            done = False
        if not done:
            missing.append(part.name)
    if missing:
        print(f"not measured within {seconds:.0f} s: {', '.join(missing)}")
    return len(missing)


def main(seconds: float = 570.0, output: pathlib.Path = RESULTS, cpu: bool = False) -> None:
    """Measures updates and training steps on the accelerator of this machine.

    Args:
      seconds: In all; parts that do not fit are left out.
      output: Folder for the records.
      cpu: Measure a CPU, too, if there is no accelerator.
    """
    if seconds <= 0:
        raise SystemExit(f"seconds is {seconds}; allowed: a number above 0.")
    kind = require_accelerator(cpu)
    output.mkdir(parents=True, exist_ok=True)
    raise SystemExit(int(run_parts(PARTS, seconds, output, name_of_device(kind)) > 0))


if __name__ == "__main__":
    tyro.cli(main)
