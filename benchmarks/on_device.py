"""All figures of one accelerator in ten minutes: `make on-device`, or this module.

Runs `benchmarks.update_speed` for the optimizer's step and the whole training step, at 117M and
345M. Each part has its own process, and the most informative comes first. A part for which no time
is left is named and left out. Results go to `results/speed/`, one file a part.
"""

import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import tyro

from benchmarks import records

_UPDATES = ("adamw", "adafactor", "muon", "adapprox", "adapprox_muon 4 bits")
_STACKED = tuple(f"{name}, stacked" for name in (*_UPDATES, "adapprox 4 bits", "adapprox_muon"))
_STEPS = ("adamw", "muon", "adapprox", "adapprox 4 bits", "adapprox_muon 4 bits")
_TRAINING = ("--training-step", "--batch", "16", "--cycles", "3", "--contenders", *_STEPS)
PARTS: dict[str, tuple[str, ...]] = {
    "update_117M": ("--steps", "20", "--contenders", *_UPDATES, *_STACKED),
    "training_step_117M": _TRAINING,
    "update_345M": ("--models", "345M", "--contenders", *_STEPS),
    "training_step_345M": ("--models", "345M", *_TRAINING),
}


def run_parts(parts: Mapping[str, Sequence[str]], seconds: float, folder: pathlib.Path) -> int:
    """Runs parts until the time is up, and returns how many are missing.

    Args:
      parts: Options of `benchmarks.update_speed`, by the name of the record.
      seconds: The time for all parts together.
      folder: Folder for the records.
    """
    end, missing = time.monotonic() + seconds, []
    for name, options in parts.items():
        output = folder / f"{name}_device.json"
        partial = output.with_suffix(".partial")  # an earlier record stays until there is a new one
        command = ["-m", "benchmarks.update_speed", *options]
        left = end - time.monotonic()
        try:
            done = (
                left > 0
                and not subprocess.run(
                    [sys.executable, *command, "--output", str(partial)], timeout=left
                ).returncode
            )
        except subprocess.TimeoutExpired:
            done = False
        if done:
            record = records.read(partial)  # its command names a file of this machine
            records.write(output, {**record, "command": shlex.join(["python", *command])})
        else:
            missing.append(name)
        partial.unlink(missing_ok=True)
    if missing:
        print(f"not measured within {seconds:.0f} s: {', '.join(missing)}")
    return len(missing)


def main(seconds: float = 570.0, output: pathlib.Path = records.RESULTS / "speed") -> None:
    """Measures updates and training steps on the accelerator of this machine.

    Args:
      seconds: The time for all parts together.
      output: Folder for the records.
    """
    if seconds <= 0:
        raise SystemExit(f"seconds is {seconds}; allowed: a number above 0.")
    parts = {name: (*options, "--no-cpu") for name, options in PARTS.items()}
    raise SystemExit(int(run_parts(parts, seconds, output) > 0))


if __name__ == "__main__":
    tyro.cli(main)
