"""What is trained for docs/results.md: optimizers with their settings, in groups, and where."""

import dataclasses
import math
import pathlib
from typing import Any

from examples.gpt2.optimizers import AdapproxOptions, Hyperparameters, Name

_LARGER = {"width": 256, "heads": 8, "eval_every": 100}


def _vim_manual() -> pathlib.Path:
    """Where Debian's package vim-runtime has it, of any version."""
    found = sorted(pathlib.Path("/usr/share/vim").glob("vim[0-9]*/doc"))
    return found[-1] if found else pathlib.Path("/usr/share/vim/vim90/doc")


# What the runs of each setting change of the program's. Prose is Vim's manual; all else is code.
# The larger model has 3.8 times the parameters.
SETTINGS: dict[str, dict[str, Any]] = {
    "code": {},
    "prose": {"data": _vim_manual()},
    "larger": _LARGER,
    "longer": {**_LARGER, "steps": 4000, "warmup": 200, "eval_every": 400},
}
TUNED_IN = {"longer": "larger"}  # whose best rates are taken, not looked for again

EXACT = 100_000  # a min_dim_size_to_factor above all sides
INCREASING = 0.8  # the exponent of a b2 of 1 - t^-0.8
NEVER = math.inf  # a clipping threshold that no update reaches
ALWAYS = 0.01  # one that every update reaches, so that all have one size
FASTER_ELSEWHERE = "8 times the rate elsewhere"
AS_MUON = "adapprox_muon, b1 and rate elsewhere of Muon"
AS_OURS = "Muon, b1 and rate elsewhere of adapprox_muon"  # which its own trials missed
NOISY = "Adafactor, float32 with the noise of 4 bits"


@dataclasses.dataclass(frozen=True)
class Entry:
    """An optimizer with its settings, and the peak rate from which its best one is looked for."""

    optimizer: Name
    rate: float
    hyper: Hyperparameters = dataclasses.field(default_factory=Hyperparameters)
    options: AdapproxOptions = dataclasses.field(default_factory=AdapproxOptions)
    seeds: int = 3
    finer: bool = False  # whether rates are tried by factors of the square root of 2 in the end


def _adapprox(
    b2: float | None, seeds: int = 1, rate: float = 2.4e-3, finer: bool = False, **options: object
) -> Entry:
    """Adapprox with a b2, None for one that increases."""
    if b2 is None:
        options = {**options, "b2_exponent": INCREASING}
    hyper = Hyperparameters() if b2 is None else Hyperparameters(b2=b2)
    given = AdapproxOptions(**options)  # type: ignore[arg-type]
    return Entry("adapprox", rate, hyper, given, seeds, finer)


def _controls() -> dict[str, Entry]:
    """The same chain with other second moments, decays and corrections."""
    moments = {
        "exact": {"min_dim_size_to_factor": EXACT},
        "rank 1": {"max_rank": 1},
        "rank 8": {},
        "rank 32": {"max_rank": 32},
    }
    decays = {"1 - t^-0.8": None, "0.999": 0.999, "0.99": 0.99, "0.95": 0.95}
    entries = {}
    for b2_name, b2 in decays.items():
        for name, options in moments.items():
            entries[f"{name}, b2 {b2_name}"] = _adapprox(b2, **options)
            if b2 is not None:
                corrected = _adapprox(b2, bias_correction=True, **options)
                entries[f"{name}, b2 {b2_name}, bias correction"] = corrected
        name = "Adafactor's means, b2 " + b2_name
        if b2 is None:
            entries[name] = Entry("adafactor", 2.4e-3, seeds=1)
        else:
            entries[name] = Entry("adafactor-b2", 2.4e-3, Hyperparameters(b2=b2), seeds=1)
    return entries


_OF_MUON = AdapproxOptions(muon_b1=0.9, rate_elsewhere=4.0)  # tuned in docs/orthogonal.md


def _tuned_muon(
    mu_dtype: str | None = None,
    seeds: int = 3,
    finer: bool = False,
    weight_decay: float = 0.1,
    **options: object,
) -> Entry:
    """adapprox_muon as docs/orthogonal.md tuned it."""
    given = {"muon_b1": 0.8, "rate_elsewhere": 2.0, "mu_dtype": mu_dtype, **options}
    hyper = Hyperparameters(weight_decay=weight_decay)
    options_of_all = AdapproxOptions(**given)  # type: ignore[arg-type]
    return Entry("adapprox-muon", 1.2e-2, hyper, options_of_all, seeds, finer)


def _opponents() -> dict[str, Entry]:
    """Each as its own users run it, with the chain's decay and schedule."""
    clipped = {b2: Hyperparameters(b2=b2, clip_norm=1.0) for b2 in (0.95, 0.99, 0.999)}
    faster = {bits: AdapproxOptions(mu_dtype=bits, rate_elsewhere=8.0) for bits in (None, "int4")}
    in_4_bits = AdapproxOptions(mu_dtype="int4")
    return {
        **{
            f"AdamW, b2 {b2}, clipped": Entry("adamw", 2.4e-3, hyper, seeds=5, finer=True)
            for b2, hyper in clipped.items()
        },
        "AdamW, b2 0.95": Entry("adamw", 2.4e-3, Hyperparameters(b2=0.95)),
        f"AdamW, b2 0.95, clipped, {FASTER_ELSEWHERE}": Entry(
            "adamw", 2.4e-3, clipped[0.95], faster[None]
        ),
        f"AdamW, b2 0.999, clipped, {FASTER_ELSEWHERE}": Entry(
            "adamw", 2.4e-3, clipped[0.999], faster[None], seeds=5, finer=True
        ),
        "AdamW in 8 bits, b2 0.95, clipped": Entry("adamw-8-bits", 2.4e-3, clipped[0.95]),
        "AdamW in 8 bits, b2 0.999, clipped": Entry(
            "adamw-8-bits", 2.4e-3, clipped[0.999], seeds=5, finer=True
        ),
        "Adafactor": Entry("adafactor", 2.4e-3, seeds=5, finer=True),
        "Adafactor, 4 bits": Entry("adafactor", 2.4e-3, options=in_4_bits, seeds=5, finer=True),
        f"Adafactor, 4 bits, {FASTER_ELSEWHERE}": Entry(
            "adafactor", 2.4e-3, options=faster["int4"], seeds=5, finer=True
        ),
        "Adafactor, b2 0.99": Entry("adafactor-b2", 2.4e-3, Hyperparameters(b2=0.99), finer=True),
        "CAME": Entry("came", 3e-4),
        "SM3": Entry("sm3", 1e-1),
        "SM3, no decay": Entry("sm3", 1e-1, Hyperparameters(weight_decay=0.0)),
        "GaLore, b2 0.95, clipped": Entry("galore", 2.4e-3, clipped[0.95]),
        "Muon": Entry("muon", 1.2e-2, options=_OF_MUON, seeds=5, finer=True),
        "Muon, clipped": Entry(
            "muon", 1.2e-2, Hyperparameters(clip_norm=1.0), _OF_MUON, seeds=5, finer=True
        ),
        AS_OURS: Entry(
            "muon",
            2.4e-2,
            options=AdapproxOptions(muon_b1=0.8, rate_elsewhere=2.0),
            seeds=5,
            finer=True,
        ),
        "NorMuon": _tuned_muon(seeds=5, finer=True, min_dim_size_to_factor=EXACT),
        "AdaMuon": _tuned_muon(
            seeds=5, finer=True, second_moment=True, min_dim_size_to_factor=EXACT
        ),
    }


def _ours() -> dict[str, Entry]:
    """The two optimizers by the bits of their averages."""
    entries = {
        "adapprox": _adapprox(0.999, 5, finer=True),
        "adapprox, 8 bits": _adapprox(0.999, 5, finer=True, mu_dtype="int8"),
        "adapprox, 4 bits": _adapprox(0.999, 5, finer=True, mu_dtype="int4"),
        **{
            f"adapprox, 4 bits{words}, {FASTER_ELSEWHERE}": _adapprox(
                b2, 5, finer=True, mu_dtype="int4", rate_elsewhere=8.0
            )
            for words, b2 in (("", 0.999), (", b2 1 - t^-0.8", None))
        },
        "adapprox_muon": _tuned_muon(seeds=5, finer=True),
        "adapprox_muon, rank 8": _tuned_muon(seeds=5, finer=True, second_moment=True),
        "adapprox_muon, 8 bits": _tuned_muon("int8", seeds=5),
        "adapprox_muon, 5 bits": _tuned_muon("int5", seeds=5),
        "adapprox_muon, 4 bits": _tuned_muon("int4", seeds=5, finer=True),
        "adapprox_muon, 4 bits, rank 2 elsewhere": _tuned_muon("int4", max_rank=2),
        "adapprox_muon, b1 0.95 and one rate": Entry("adapprox-muon", 1.2e-2),
    }
    without = Hyperparameters(b1=0.0)
    of_muon = AdapproxOptions(muon_b1=0.0, rate_elsewhere=2.0)
    return {
        **entries,
        "adapprox, no average": Entry("adapprox", 1.2e-3, without, finer=True),
        "adapprox_muon, no average": Entry(
            "adapprox-muon", 1.2e-2, without, of_muon, seeds=5, finer=True
        ),
    }


def _choices() -> dict[str, Entry]:
    """What could be another default of `adapprox`, and of `adapprox_muon`, one change at a time."""
    dense = {
        f"adapprox, best {words} of rank 8": Entry(
            "adapprox-dense", 2.4e-3, options=AdapproxOptions(approximate=kind), seeds=3
        )
        for words, kind in (
            ("root", "root"),
            ("fourth root", "fourth-root"),
            ("whitened root", "whitened-root"),
            ("whitened moment", "whitened-moment"),
        )
    }
    return {
        "adapprox, unchanged": _adapprox(0.999, 3),  # on the grid of those that follow
        **{f"adapprox, b2 {b2}": _adapprox(b2, 3) for b2 in (0.99, 0.95)},
        "adapprox, b2 1 - t^-0.8": _adapprox(None, 3),
        "adapprox, bias correction": _adapprox(0.999, 3, bias_correction=True),
        "adapprox, cautious decay": _adapprox(0.999, 3, cautious_weight_decay=True),
        f"adapprox, {FASTER_ELSEWHERE}": _adapprox(0.999, 3, rate_elsewhere=8.0),
        "adapprox, rank 32 for the embedding": _adapprox(0.999, 3, embedding_rank=32),
        "adapprox, bias correction and no clipping": _adapprox(
            0.999, 3, bias_correction=True, clipping_threshold=NEVER
        ),
        **{
            f"adapprox, b2 {b2}, every update scaled to one size": Entry(
                "adapprox",
                2.4e-3 / ALWAYS,
                Hyperparameters(b2=b2, weight_decay=0.1 * ALWAYS),
                AdapproxOptions(clipping_threshold=ALWAYS),
            )
            for b2 in (0.999, 0.99)
        },
        "adapprox, rank 16": _adapprox(0.999, 3, max_rank=16),
        "adapprox, ranks from 1 to a quarter": _adapprox(0.999, 3, initial_rank=1, max_rank=0.25),
        "adapprox, the moment itself": _adapprox(0.999, 3, approximate="moment"),
        "adapprox, cosine guidance": _adapprox(0.999, 3, 1.2e-3, cosine_guidance=True),
        "adapprox, average in bfloat16": _adapprox(0.999, 3, mu_dtype="bfloat16"),
        "adapprox, factors in bfloat16": _adapprox(0.999, 3, factor_dtype="bfloat16"),
        "adapprox, the paper's settings": Entry("adapprox-paper", 2.4e-3, seeds=3),
        **dense,
        "adapprox_muon, unchanged": _tuned_muon(),
        "adapprox_muon, b1 0.95": _tuned_muon(muon_b1=0.95),
        AS_MUON: Entry("adapprox-muon", 1.2e-2, options=_OF_MUON),
        "adapprox_muon, one rate": _tuned_muon(rate_elsewhere=1.0),
        "adapprox_muon, cautious decay": _tuned_muon(cautious_weight_decay=True),
        "adapprox_muon, half the decay": _tuned_muon(weight_decay=0.05),
        "adapprox_muon, no decay": _tuned_muon(weight_decay=0.0),
    }


def _averages() -> dict[str, Entry]:
    """Without the average, as in the paper's Figure 7; that of `adapprox` is among ours."""
    clipped = Hyperparameters(b1=0.0, clip_norm=1.0)
    return {
        "AdamW, clipped, no average": Entry("adamw", 1.2e-3, clipped, finer=True),
        "Adafactor, no average": Entry("adafactor", 1.2e-3, Hyperparameters(b1=0.0), finer=True),
    }


def _noise() -> dict[str, Entry]:
    """Whether it is the noise of 4 bits that lowers the loss."""
    return {NOISY: Entry("adafactor-noisy", 2.4e-3, seeds=5, finer=True)}


def _larger() -> dict[str, Entry]:
    """Some of those that are compared, with more parameters."""
    all_entries = {**_ours(), **_opponents(), **_choices()}
    adamws = ("AdamW, b2 0.95, clipped", "AdamW, b2 0.999, clipped")
    ours = ("adapprox_muon", "adapprox_muon, b1 0.95", "adapprox")
    chosen = (*ours, "Muon", *adamws)
    return {
        label: dataclasses.replace(
            all_entries[label], rate=all_entries[label].rate / 2, seeds=1, finer=False
        )
        for label in chosen
    }


def _longer() -> dict[str, Entry]:
    """The same for more steps, but for one AdamW: a run takes an hour of a core."""
    return {x: entry for x, entry in _larger().items() if x != "AdamW, b2 0.999, clipped"}


GROUPS: dict[str, dict[str, Entry]] = {
    "ours": _ours(),
    "opponents": _opponents(),
    "controls": _controls(),
    "choices": _choices(),
    "averages": _averages(),
    "noise": _noise(),
    "larger": _larger(),
    "longer": _longer(),
}
GROUPS_OF = {
    "code": ("ours", "opponents", "controls", "choices", "averages", "noise"),
    "prose": ("ours", "opponents", "noise"),
    "larger": ("larger",),
    "longer": ("longer",),
}
