"""All figures of one accelerator in ten minutes: `make on-device`, or this module.

Runs `benchmarks.update_speed` for the update and the whole training step, at 117M and 345M. Each
part has its own process, and the most informative comes first. A part for which no time is left is
named and left out. Results go to `results/speed/`, one file a part.
"""

import dataclasses
import pathlib
import subprocess
import sys
import time
from typing import Literal

import tyro

from benchmarks.accelerator import require_accelerator
from benchmarks.records import RESULTS, name_of_device

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
        """What it measures, as part of a file name."""
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
        output.unlink(missing_ok=True)  # from an earlier run
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


def main(
    seconds: float = 570.0, output: pathlib.Path = RESULTS / "speed", cpu: bool = False
) -> None:
    """Measures updates and training steps on the accelerator of this machine.

    Args:
      seconds: The time for all parts together.
      output: Folder for the records.
      cpu: Measure a CPU if there is no accelerator.
    """
    if seconds <= 0:
        raise SystemExit(f"seconds is {seconds}; allowed: a number above 0.")
    kind = require_accelerator(cpu)
    output.mkdir(parents=True, exist_ok=True)
    raise SystemExit(int(run_parts(PARTS, seconds, output, name_of_device(kind)) > 0))


if __name__ == "__main__":
    tyro.cli(main)
