"""GPT-2 117M on 64 MiB of text, one optimizer after another: `python -m benchmarks.at_scale`.

The text is the source of the Python packages that are installed here. Peak rates are those of the
small model's study, all multiplied by one factor. SIGTERM saves and the same command goes on, so
that `timeout --signal TERM 9m python -m benchmarks.at_scale` works in pieces.
"""

import hashlib
import pathlib
import shutil
import sysconfig
from typing import Literal

import jax
import tyro

from benchmarks import loss_tables, records
from benchmarks.loss_study import Study
from examples.gpt2.config import Config

NAMES = (
    "AdamW b2 0.999, clipped",
    "adapprox",
    "Muon b1 0.8, other parameters x2",
    "adapprox_muon",
    "adapprox_muon 4 bits",
)


def write_text(folder: pathlib.Path, mebibytes: int) -> pathlib.Path:
    """Gathers the source of installed packages, in the order of a hash of the files' paths.

    Args:
      folder: The text is put in a folder within, named after its size, unless that exists.
      mebibytes: Size of the text.

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
    for digest, name in sorted((hashlib.sha256(name.encode()).hexdigest(), name) for name in files):
        content = files[name].read_bytes()
        try:
            content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        (partial / f"{digest}.py").write_bytes(content)
        left -= len(content)
        if left <= 0:
            partial.rename(there)
            return there
    had = mebibytes - left / 2**20
    raise SystemExit(f"--mebibytes is {mebibytes}; {root} has {had:.0f} MiB of source.")


def main(
    model: Literal["tiny", "117M", "345M"] = "117M",
    steps: int = 1000,
    batch_size: int = 64,
    accumulate: int = 1,
    mebibytes: int = 64,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    rate_factor: float = 0.25,
    names: tuple[str, ...] = NAMES,
    folder: pathlib.Path = pathlib.Path("runs/at_scale"),
    cpu: bool = False,
) -> None:
    """Trains what is missing, and prints a table.

    Args:
      model: The model.
      steps: Updates of each optimizer.
      batch_size: Windows of text in an update.
      accumulate: Parts that a batch is worked on in, one after the other.
      mebibytes: Size of the text.
      dtype: Type that the layers compute in.
      rate_factor: Factor of all peak rates.
      names: Contenders of `loss_study`.
      folder: For the text, the runs and their records.
      cpu: Train on a CPU if there is no accelerator.
    """
    best = loss_tables.summarize(loss_tables.read(loss_tables.STUDY))
    allowed = [name for setting, name in best if setting == "code"]
    records.check_names("--names", names, allowed)
    if jax.default_backend() == "cpu" and not cpu:
        raise SystemExit("JAX sees no accelerator here; --cpu takes the CPU.")
    config = Config(
        model=model,
        data=write_text(folder, mebibytes),
        steps=steps,
        warmup=max(1, steps // 20),
        batch_size=batch_size,
        accumulate=accumulate,
        dtype=dtype,
        eval_every=max(1, steps // 20),
    )
    runs = folder / f"{model}-{steps}-steps-of-{batch_size}-{mebibytes}-MiB-{dtype}"
    study = Study(model, config, runs)
    for name in names:
        study.losses(name, best["code", name].rate * rate_factor, seeds=(0,))
    results = loss_tables.summarize(study.rows)
    print(loss_tables.comparison(results, names, names[0], (model,)))
    print(f"records: {study.file}")


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,))
