"""Compares optimizers by validation loss, each at its best peak rate.

    python -m benchmarks.loss_study adapprox "AdamW b2 0.999, clipped" --seeds 3
    python -m benchmarks.loss_study adapprox --seeds 3 --rates 2.4e-3
    python -m benchmarks.loss_study adapprox "adapprox, split" --seeds 3

Peak rates are tried by factors of the square root of 2 around a contender's first one, until the
best has a worse one on either side. Every rate runs with every seed. A seed draws the same
parameters and batches for all contenders, so that differences are paired. A finished run is a line
of `runs.jsonl` in the study's folder and is not done again: after Ctrl-C or SIGTERM the same
command goes on. Runs belong to the code that made them, so give another folder to new code.
"""

import dataclasses
import functools
import json
import math
import pathlib
import platform
import re
import subprocess
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args

import jax
import optax
import tyro

import adapprox_jax
from benchmarks import contenders, loss_tables
from benchmarks.contenders import DECAY
from benchmarks.opponents.adam_8_bits import scale_by_adam_8_bits
from benchmarks.opponents.came import scale_by_came
from examples.gpt2.config import Config
from examples.gpt2.optimizers import Weights
from examples.gpt2.train import DivergedError, train

Make = Callable[[optax.Schedule], optax.GradientTransformation]

_PROSE = pathlib.Path("/usr/share/vim/vim90/doc")  # Debian's vim-runtime
_LARGER = Config(width=256, heads=8, eval_every=100)
_SMALL = Config(layers=2, width=64, heads=2, context=64, eval_every=10, eval_batches=8)
SETTINGS = {
    "code": Config(),
    "prose": Config(data=_PROSE),
    "code, 8 micro-batches": Config(accumulate=8),
    "prose, 8 micro-batches": Config(data=_PROSE, accumulate=8),
    "small, code": _SMALL,
    "small, code, no warmup": dataclasses.replace(_SMALL, warmup=0),
    "small, prose": dataclasses.replace(_SMALL, data=_PROSE),
    "small, prose, no warmup": dataclasses.replace(_SMALL, data=_PROSE, warmup=0),
    "small, code, 1600 steps": dataclasses.replace(_SMALL, steps=1600, warmup=80, eval_every=100),
    "small, code, 6400 steps": dataclasses.replace(_SMALL, steps=6400, warmup=320, eval_every=400),
    "small, prose, 1600 steps": dataclasses.replace(
        _SMALL, data=_PROSE, steps=1600, warmup=80, eval_every=100
    ),
    "larger": _LARGER,
    "longer": dataclasses.replace(_LARGER, steps=4000, warmup=200, eval_every=400),
}


class Contender(NamedTuple):
    """An optimizer with its settings, and a peak rate near its best one."""

    make: Make
    rate: float


def is_matrix(params: Any) -> Any:
    """The leaves that decay: those with two axes or more."""
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def _is_other(params: Any) -> Any:
    return jax.tree.map(lambda hidden: not hidden, adapprox_jax.hidden_matrices(params))


def _with_decay(directions: optax.GradientTransformation, other_rate: float = 1.0) -> Make:
    """Directions with weight decay; those of parameters outside hidden matrices are multiplied."""
    scaled = optax.chain(directions, optax.masked(optax.scale(other_rate), _is_other))
    return lambda rate: contenders.with_decay(scaled, rate, mask=is_matrix)


def _clipped(directions: optax.GradientTransformation) -> optax.GradientTransformation:
    """With all gradients together clipped at norm 1."""
    return optax.chain(optax.clip_by_global_norm(1.0), directions)


def _decayed(make: Callable[..., optax.GradientTransformation], **settings: Any) -> Make:
    """An optimizer that has a weight decay of its own."""
    return lambda rate: make(rate, weight_decay=DECAY, mask=is_matrix, **settings)


def _adapprox(**settings: Any) -> Make:
    return _decayed(adapprox_jax.adapprox, **settings)


def _adapprox_muon(b1: float = 0.8, others: float = 2.0, **settings: Any) -> Make:
    """With the settings tuned for these runs; `others` scales the rate of other parameters."""
    muon = adapprox_jax.adapprox_muon
    return _decayed(muon, b1=b1, adapprox_learning_rate_scale=others, **settings)


def _as_muon(**settings: Any) -> Make:
    """With the b1 and the one rate of Muon's defaults."""
    return _adapprox_muon(b1=0.95, others=1.0, **settings)


def _plain_others(rate: optax.Schedule) -> optax.GradientTransformation:
    """The same, but other parameters have no Nesterov's momentum."""
    everything = {"orthogonalized": lambda params: jax.tree.map(lambda _: True, params)}
    hidden, others = _as_muon(**everything)(rate), _adapprox(b2=0.95, nesterov=False)(rate)
    return optax.partition({True: hidden, False: others}, adapprox_jax.hidden_matrices)


def _separate(make: Make) -> Make:
    return lambda rate: contenders.on_separate_matrices(make(rate))


_ADAMW = _clipped(optax.scale_by_adam(b2=0.999))
_WHOLE = {"weight_dimension_numbers": adapprox_jax.MatrixDimensionNumbers()}
_BY_HEADS = {"weight_dimension_numbers": adapprox_jax.head_by_head(32)}  # of all models here
_EXACT = {"min_dim_size_to_factor": 100_000}  # no side is as long, so nothing is factored
CONTENDERS: dict[str, Contender] = {
    "adapprox": Contender(_adapprox(), 4.8e-3),
    "adapprox 8 bits": Contender(_adapprox(mu_dtype="int8"), 2.4e-3),
    "adapprox 4 bits": Contender(_adapprox(mu_dtype="int4"), 2.4e-3),
    "adapprox rank 16": Contender(_adapprox(max_rank=16), 2.4e-3),
    "adapprox ranks from 1 to a quarter": Contender(
        _adapprox(initial_rank=1, max_rank=0.25), 2.4e-3
    ),
    "adapprox without Nesterov": Contender(_adapprox(nesterov=False), 4.8e-3),
    "adapprox no average": Contender(_adapprox(b1=0.0), 1.2e-3),
    "adapprox 4 bits, other parameters x8": Contender(
        _with_decay(adapprox_jax.adapprox(-1.0, weight_decay=0.0, mu_dtype="int4"), 8.0), 2.4e-3
    ),
    "adapprox_muon": Contender(_adapprox_muon(), 1.2e-2),
    "adapprox_muon 8 bits": Contender(_adapprox_muon(mu_dtype="int8"), 1.2e-2),
    "adapprox_muon 4 bits": Contender(_adapprox_muon(mu_dtype="int4"), 1.2e-2),
    "adapprox_muon rank 8": Contender(_adapprox_muon(second_moment=True), 1.2e-2),
    "adapprox_muon b1 0.95": Contender(_adapprox_muon(b1=0.95), 1.2e-2),
    "adapprox_muon b1 0.95, one rate": Contender(_as_muon(), 1.7e-2),
    "adapprox_muon b1 0.95, one rate, 5 bits": Contender(_as_muon(mu_dtype="int5"), 1.7e-2),
    "adapprox_muon b1 0.95, one rate, 4 bits": Contender(_as_muon(mu_dtype="int4"), 1.7e-2),
    "adapprox_muon b1 0.95, one rate, qkv whole": Contender(_as_muon(**_WHOLE), 1.7e-2),
    "adapprox_muon b1 0.95, one rate, by heads": Contender(_as_muon(**_BY_HEADS), 1.7e-2),
    "adapprox_muon b1 0.95, one rate, others without Nesterov": Contender(_plain_others, 1.7e-2),
    "adapprox_muon no average": Contender(_adapprox_muon(b1=0.0, adapprox_b1=0.0), 1.2e-2),
    "NorMuon": Contender(_adapprox_muon(**_EXACT), 1.2e-2),
    "AdaMuon": Contender(_adapprox_muon(second_moment=True, **_EXACT), 1.2e-2),
    "AdamW b2 0.95, clipped": Contender(
        _with_decay(_clipped(optax.scale_by_adam(b2=0.95))), 2.4e-3
    ),
    "AdamW b2 0.999, clipped": Contender(_with_decay(_ADAMW), 2.4e-3),
    "AdamW b2 0.999, clipped, other parameters x8": Contender(_with_decay(_ADAMW, 8.0), 2.4e-3),
    "AdamW with Nesterov, b2 0.999, clipped": Contender(
        _with_decay(_clipped(optax.scale_by_adam(b2=0.999, nesterov=True))), 4.8e-3
    ),
    "AdamW 8 bits, b2 0.999, clipped": Contender(
        _with_decay(_clipped(scale_by_adam_8_bits())), 2.4e-3
    ),
    "Adafactor": Contender(_with_decay(contenders.adafactor()), 2.4e-3),
    "Adafactor 4 bits": Contender(_with_decay(contenders.adafactor(mu_dtype="int4")), 2.4e-3),
    "Adafactor 4 bits with Nesterov": Contender(
        _with_decay(contenders.adafactor(mu_dtype="int4", nesterov=True)), 4.8e-3
    ),
    "Adafactor 4 bits, other parameters x8": Contender(
        _with_decay(contenders.adafactor(mu_dtype="int4"), 8.0), 2.4e-3
    ),
    "CAME": Contender(_with_decay(scale_by_came()), 3e-4),
    "Muon defaults": Contender(_with_decay(contenders.muon()), 1.7e-2),
    "Muon defaults, q k v separate": Contender(_separate(_with_decay(contenders.muon())), 1.7e-2),
    "Muon": Contender(_with_decay(contenders.muon(0.9), 4.0), 1.2e-2),
    "Muon b1 0.8, other parameters x2": Contender(_with_decay(contenders.muon(0.8), 2.0), 2.4e-2),
    "Muon b1 0.8, other parameters x2, q k v separate": Contender(
        _separate(_with_decay(contenders.muon(0.8), 2.0)), 2.4e-2
    ),
}

# What is tried jointly with the peak rate, at several lengths.
CONTENDERS |= {
    f"{name}, b1 {b1:g}, other parameters x{scale:g}": Contender(make(b1, scale), 1.7e-2)
    for b1 in (0.8, 0.9, 0.95)
    for scale in (1.0, 2.0, 4.0)
    for name, make in {
        "adapprox_muon": _adapprox_muon,
        "adapprox_muon 4 bits": functools.partial(_adapprox_muon, mu_dtype="int4"),
        "NorMuon": functools.partial(_adapprox_muon, **_EXACT),
        "Muon, q k v separate": lambda b1, scale: _separate(
            _with_decay(contenders.muon(b1), scale)
        ),
    }.items()
}


# As it is without a word from the user.
CONTENDERS |= {
    f"adapprox_muon{bits}, b1 by rate": Contender(
        _decayed(adapprox_jax.adapprox_muon, mu_dtype=mu_dtype), 1.7e-2
    )
    for bits, mu_dtype in (("", None), (" 8 bits", "int8"), (" 4 bits", "int4"))
} | {
    "adapprox_muon, b1 by rate, only hidden matrices decay": Contender(
        functools.partial(
            adapprox_jax.adapprox_muon, weight_decay=DECAY, mask=adapprox_jax.hidden_matrices
        ),
        8.5e-3,
    ),
}


def _parts_of(name: str) -> tuple[str, Weights]:
    """A contender, and how its weights are kept, which may follow it: "Muon, split"."""
    contender, _, last = name.rpartition(", ")
    return (contender, last) if last in get_args(Weights) else (name, "float32")


def tune(loss: Callable[[float], float], first: float) -> float:
    """Looks for the best peak rate by factors of the square root of 2.

    Args:
      loss: The loss at a rate, infinite where it diverges.
      first: The rate to begin with.

    Returns:
      The best rate; both of its neighbours were tried and are no better.

    Raises:
      ValueError: If the loss is infinite at the first rate and at both of its neighbours.
    """
    losses: dict[int, float] = {}
    best = 0
    while missing := {best - 1, best, best + 1} - losses.keys():
        losses |= {place: loss(first * 2 ** (place / 2)) for place in sorted(missing)}
        best = min(losses, key=lambda place: losses[place])
        if math.isinf(losses[best]):
            raise ValueError(f"all runs near a peak rate of {first:g} diverge")
    return first * 2 ** (best / 2)


class Study:
    """The runs of one setting in one folder."""

    def __init__(self, setting: str, config: Config, folder: pathlib.Path) -> None:
        """Reads the runs that are there."""
        self.setting, self.config, self.folder = setting, config, folder
        self.file = folder / "runs.jsonl"
        self.rows = loss_tables.read(self.file) if self.file.exists() else []

    def losses(self, name: str, rate: float, seeds: Sequence[int]) -> list[float]:
        """The losses of a contender at a rate, from runs that are made now if they are missing."""
        try:
            return [loss_tables.loss_of(self._run(name, rate, seed)) for seed in seeds]
        except KeyboardInterrupt as interruption:
            words = f"{interruption or 'interrupted'}: the same command goes on"
            raise SystemExit(words) from None

    def _run(self, name: str, rate: float, seed: int) -> dict[str, Any]:
        for row in self.rows:
            used = row["settings"]
            same = (row["setting"], row["contender"], used["seed"]) == (self.setting, name, seed)
            if same and math.isclose(used["learning_rate"], rate):
                return row
        words = re.sub(r"\W+", "-", f"{self.setting} {name} {rate:g} {seed}")
        out = self.folder / words
        print(f"-- {self.setting}, {name}, peak rate {rate:g}, seed {seed}", flush=True)
        config = dataclasses.replace(
            self.config,
            learning_rate=rate,
            seed=seed,
            weights=_parts_of(name)[1],
            out=out,
            resume=any(saved.name.isdigit() for saved in (out / "checkpoints").glob("*")),
        )
        row = {"setting": self.setting, "contender": name, **_trained(config, name)}
        self.folder.mkdir(parents=True, exist_ok=True)
        is_broken = self.file.exists() and not self.file.read_bytes().endswith(b"\n")
        with open(self.file, "a") as file:
            file.write("\n" * is_broken + json.dumps(row) + "\n")
        self.rows.append(row)
        jax.clear_caches()  # each run compiles its own functions
        return row


def _trained(config: Config, name: str) -> dict[str, Any]:
    """The record of one run; its loss is None where it diverged."""
    versions = {"python": platform.python_version(), "jax": jax.__version__, "code": _revision()}
    try:
        result = train(config, optimizer=CONTENDERS[_parts_of(name)[0]].make, keep=False)
    except DivergedError as error:
        print(f"diverged: {error}")
        used = {"learning_rate": config.learning_rate, "seed": config.seed}
        nothing = {"validation_loss": None, "curve": [], "memory": None, "seconds": None}
        return {"settings": used, **nothing, "versions": versions}
    # The settings' own optimizer was not used.
    used = {k: v for k, v in result.settings.items() if k not in _OF_OPTIMIZER}
    return {**result._asdict(), "settings": used, "versions": versions}


_OF_OPTIMIZER = ("optimizer", "optimizer_settings", "options")


def _revision() -> str:
    """The commit of this clone, with "-dirty" where files differ; empty outside of a clone."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    folder = pathlib.Path(__file__).parent
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main(
    names: Annotated[tuple[str, ...], tyro.conf.Positional],
    /,
    setting: Literal[*SETTINGS] = "code",  # type: ignore[valid-type]
    seeds: int = 3,
    rates: tuple[float, ...] = (),
    folder: pathlib.Path = pathlib.Path("runs/loss_study"),
) -> None:
    """Trains what is missing, prints a table, and draws loss against bytes of state.

    Args:
      names: Contenders, of the table in this file, compared with the first one; ", split" and the
        like after one are for weights that are kept as `examples.gpt2.train --weights` has them.
      setting: The model and the text.
      seeds: How many, from 0.
      rates: Peak rates to try instead of a search.
      folder: For the runs, the records and the picture.
    """
    unknown = [name for name in names if _parts_of(name)[0] not in CONTENDERS]
    if unknown or not names:
        raise SystemExit(f"contenders are {list(names)}; allowed: {'; '.join(CONTENDERS)}.")
    if seeds < 1 or any(not 0 < rate < math.inf for rate in rates):
        raise SystemExit(f"{seeds=}, {rates=}; allowed: at least 1 seed, and rates above 0.")

    def mean(name: str, rate: float) -> float:
        return math.fsum(study.losses(name, rate, range(seeds))) / seeds

    study = Study(setting, SETTINGS[setting], folder)
    try:
        for name in names:
            for rate in rates:
                mean(name, rate)
            if not rates:
                tune(functools.partial(mean, name), CONTENDERS[_parts_of(name)[0]].rate)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    results = loss_tables.summarize(study.rows)
    print(loss_tables.comparison(results, names, names[0], (setting,)))
    finite = [name for name in names if math.isfinite(results[setting, name].mean)]
    points = {name: (name, (0.0, 8.0)) for name in finite}
    loss_tables.draw_points(results, points, (setting,), folder / "loss_against_bytes.png")
    print(f"records and picture in {folder}")


if __name__ == "__main__":
    tyro.cli(main)
