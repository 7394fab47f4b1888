"""GPT-2 117M on 64 MiB of text, an optimizer after the other: `python -m benchmarks.at_scale`.

Ends after `--minutes`, saves, and goes on from there when it is called again; once all have had
their tokens it writes what they came to, to `results/at_scale/`. The text is the source of the
Python packages that are installed here. Peak rates are those of the small model's study times
`--rate-factor`, the same for all.
"""

import dataclasses
import hashlib
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from typing import Any, Literal

import jax
import tyro

from benchmarks import record_files
from benchmarks.accelerator import require_accelerator
from benchmarks.loss_entries import AS_OURS, GROUPS, Entry
from examples.gpt2 import plots, records
from examples.gpt2.checkpoints import any_saved
from examples.gpt2.command import exit_code
from examples.gpt2.config import PRESETS, Config
from examples.gpt2.run import run

RESULTS = pathlib.Path(__file__).parents[1] / "results" / "at_scale"
_ALL: dict[str, Entry] = {**GROUPS["ours"], **GROUPS["opponents"]}
# With the peak rates that the small model's study found on code.
RATES = {
    "AdamW, b2 0.999, clipped": 3.4e-3,
    "adapprox": 3.4e-3,
    AS_OURS: 1.7e-2,
    "adapprox_muon": 1.2e-2,
    "adapprox_muon, 4 bits": 1.7e-2,
}
LABELS = tuple(RATES)
TIME_TO_SAVE = 120  # seconds


@dataclasses.dataclass(frozen=True)
class Scale:
    """What is trained, and how much of it."""

    model: Literal["tiny", "117M", "345M"] = "117M"
    """Size of the model."""
    steps: int = 1000
    """Updates of each optimizer."""
    batch_size: int = 64
    """Windows of text in an update."""
    accumulate: int = 1
    """Parts that a batch is worked on in."""
    mebibytes: int = 64
    """Of text."""
    rate_factor: float = 0.25
    """What the small model's rates are multiplied by."""
    seed: int = 0
    """Of parameters and order."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What the layers compute in."""
    folder: pathlib.Path = pathlib.Path("runs/at_scale")
    """For the text and the runs."""


def write_text(folder: pathlib.Path, mebibytes: int) -> pathlib.Path:
    """Gathers the source of installed packages, file by file in the order of a hash of their paths.

    Args:
      folder: Where the text is put, in a folder named after its size, unless that is there.
      mebibytes: How much is wanted.

    Returns:
      The folder with the text.

    Raises:
      SystemExit: If there is less.
    """
    there = folder / f"text-{mebibytes}"
    if there.exists():
        return there
    root = pathlib.Path(sysconfig.get_paths()["purelib"])
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    partial = there.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True, exist_ok=True)
    left = mebibytes * 2**20
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        content = files[name].read_bytes()
        try:
            content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        (partial / f"{hashlib.sha256(name.encode()).hexdigest()}.py").write_bytes(content)
        left -= len(content)
        if left <= 0:
            partial.rename(there)
            return there
    had = mebibytes - left / 2**20
    raise SystemExit(f"--mebibytes is {mebibytes}; {root} has {had:.0f} MiB of source.")


def config_of(label: str, scale: Scale) -> Config:
    """The settings of one optimizer's run."""
    entry, preset = _ALL[label], PRESETS[scale.model]
    return Config(
        model=scale.model,
        optimizer=entry.optimizer,
        data=scale.folder / f"text-{scale.mebibytes}",
        steps=scale.steps,
        batch_size=scale.batch_size,
        accumulate=scale.accumulate,
        learning_rate=RATES[label] * scale.rate_factor,
        warmup=max(1, scale.steps // 20),
        seed=scale.seed,
        dtype=scale.dtype,
        hyper=entry.hyper,
        adapprox=entry.options,
        out=scale.folder / f"{label.replace(' ', '-').replace(',', '')}-{_digest(scale)}",
        cache=scale.folder / "data",
        eval_every=max(1, scale.steps // 20),
        checkpoint_every=preset.checkpoint_every,
    )


def _digest(scale: Scale) -> str:
    """Names what is trained, so that runs of one scale are not taken for those of another."""
    decides = {**dataclasses.asdict(scale), "folder": None}
    return hashlib.sha256(repr(decides).encode()).hexdigest()[:12]


def rows_of(label: str, scale: Scale) -> list[dict[str, Any]]:
    """The rows that a run has written so far."""
    return records.read(config_of(label, scale).out / "metrics.jsonl")


def is_done(label: str, scale: Scale) -> bool:
    """Whether an optimizer has had all of its steps."""
    return any(r["step"] == scale.steps and "validation_loss" in r for r in rows_of(label, scale))


def main(
    scale: Scale,
    minutes: float = 9.0,
    only: str | None = None,
    output: pathlib.Path = RESULTS,
    cpu: bool = False,
) -> None:
    """Trains what is missing, until the time is up.

    Args:
      scale: What is trained.
      minutes: In all; then the run at work saves and ends.
      only: One of `LABELS`, which is trained to its end in this process.
      output: Folder for the record and the picture.
      cpu: Train on a CPU, too, if there is no accelerator.
    """
    if only is not None:
        if only not in LABELS:
            raise SystemExit(f"--only is {only!r}; allowed: {', '.join(LABELS)}.")
        config = config_of(only, scale)
        config = dataclasses.replace(config, resume=any_saved(config.out))
        raise SystemExit(exit_code(lambda: run(config), "the same command"))
    end = time.monotonic() + 60 * minutes
    kind = require_accelerator(cpu)
    write_text(scale.folder, scale.mebibytes)
    for label in LABELS:
        while not is_done(label, scale):
            left = end - time.monotonic()
            code = _train(label, left) if left > 0 else 0
            if time.monotonic() >= end and not is_done(label, scale):
                raise SystemExit(f"{label} is not done: the same command goes on.")
            if code:
                raise SystemExit(code)
    write_results(scale, output, kind)


def _train(label: str, seconds: float) -> int:
    """Trains in a process of its own, which is asked to save when the time is up."""
    command = [sys.executable, "-m", "benchmarks.at_scale", *sys.argv[1:], "--only", label]
    with subprocess.Popen(command) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                return process.wait(TIME_TO_SAVE)
            except subprocess.TimeoutExpired:
                process.kill()
                raise SystemExit(
                    f"{label} did not save within {TIME_TO_SAVE} s: the same command goes on from"
                    " its last checkpoint."
                ) from None


def write_results(scale: Scale, output: pathlib.Path, kind: str) -> None:
    """Writes the record of all runs on a kind of device, their curves and a table."""
    found = {}
    for label in LABELS:
        rows = rows_of(label, scale)
        curve = [(r["step"], r["validation_loss"]) for r in rows if "validation_loss" in r]
        used = json.loads((config_of(label, scale).out / "settings.json").read_text())
        speeds = sorted(r["tokens_per_second"] for r in rows if "tokens_per_second" in r)
        found[label] = {
            "settings": used,
            "curve": curve,
            "validation_loss": curve[-1][1],
            "tokens_per_second": speeds[len(speeds) // 2],
        }
    record = {
        "command": f"python -m benchmarks.at_scale {' '.join(sys.argv[1:])}".strip(),
        "device": kind,
        "jax": jax.__version__,
        "runs": found,
    }
    name = f"{scale.model}_{record_files.name_of_device(kind)}"
    record_files.write(output / f"{name}.json", record)
    curves = {label: [one["curve"]] for label, one in found.items()}
    plots.plot_comparison(curves, output / f"{name}.png")
    print("| optimizer | peak rate | validation loss | tokens a second |")
    print("| --- | ---: | ---: | ---: |")
    for label, one in found.items():
        rate = one["settings"]["learning_rate"]
        print(
            f"| {label} | {rate:g} | {one['validation_loss']:.4f} |"
            f" {one['tokens_per_second']:,.0f} |"
        )


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes))
