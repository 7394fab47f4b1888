"""adapprox_muon: orthogonal directions with a second moment for hidden matrices."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import optax

from adapprox_jax.argument_checks import (
    DECAY,
    POSITIVE,
    check_state,
    require,
    require_choice,
    require_integer,
    require_precise,
)
from adapprox_jax.linalg.orthonormalize import Orthogonalization
from adapprox_jax.optimizers.named_chain import named_chain
from adapprox_jax.params.hidden_matrices import HIDDEN, OTHERS, Selection, resolve_selection
from adapprox_jax.params.views import WeightDimensionNumbers
from adapprox_jax.schedules import RankGrowth, momentum_by_rate
from adapprox_jax.settings import Hyperparameters, Settings
from adapprox_jax.step.approximation import Approximate
from adapprox_jax.transforms.guided_ema import average_unless_zero, code_bits, reads_twice
from adapprox_jax.transforms.matrix_rms import scale_to_matrix_rms
from adapprox_jax.transforms.neuron_moment import scale_by_neuron_moment
from adapprox_jax.transforms.orthogonalize import orthogonalize
from adapprox_jax.transforms.scale_by_adapprox import scale_with
from adapprox_jax.transforms.weight_decay import decay_and_rate

RMS = 0.2  # of the updates of a matrix before the learning rate, as those of AdamW are


def adapprox_muon(
    learning_rate: optax.ScalarOrSchedule,
    b1: optax.ScalarOrSchedule | None = None,
    b2: optax.ScalarOrSchedule = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: jax.typing.DTypeLike | None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    *,
    orthogonalized: Selection = None,
    nesterov: bool = True,
    newton_schulz_steps: int | None = None,
    second_moment: bool | Literal["neurons"] = "neurons",
    cautious_weight_decay: bool = False,
    adapprox_b1: jax.typing.ArrayLike = 0.9,
    adapprox_learning_rate_scale: jax.typing.ArrayLike = 2.0,
    initial_rank: int | None = None,
    max_rank: int | float | None = None,
    error_threshold: optax.ScalarOrSchedule = 0.01,
    rank_interval: int | None = None,
    rank_growth: RankGrowth | None = None,
    power_iterations: int | None = None,
    oversampling: int | None = None,
    rotate: bool = True,
    warm_start: bool = True,
    approximate: Approximate = "root",
    orthogonalization: Orthogonalization = "cholesky",
    min_dim_size_to_factor: int | None = None,
    weight_dimension_numbers: WeightDimensionNumbers = None,
    factor_dtype: jax.typing.DTypeLike | None = None,
    key: int | jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon with a second moment of its directions, and `adapprox` for all other parameters.

    Hidden matrices: running average, Nesterov's momentum, `orthogonalize`, `scale_by_neuron_moment`
    or `scale_by_adapprox` of the direction, a root mean square of 0.2. All other parameters:
    `scale_by_adapprox`, `clip_by_matrix_rms`, `guided_ema`. Then decay and rate for both. Updates
    have about the size of AdamW's; begin with 5 times its rate (docs/choosing.md).

    Args:
      learning_rate: A number or a schedule.
      b1: Decay of the running average of the gradients of hidden matrices, in [0, 1), or a function
        from the step, from 1, to it. With 0 none is kept: directions are of the gradients
        themselves. None for 1 - learning_rate / 0.08, at least 0.8 and at most 0.95, or 0.9 in 4
        bits (docs/orthogonal.md). If another transformation applies the rate, give a number.
      b2: Decay of the second moments, in [0, 1), or a function from the step to it; with
        second_moment="neurons" a number.
      eps: Added to the root of a second moment, at least 0.
      eps_root: Added under the root, at least 0.
      mu_dtype: Type of the running averages, as in `guided_ema`: int8, "int5" or int4 for codes.
        Of hidden matrices they are rounded to the nearest.
      weight_decay: Decoupled weight decay, multiplied by the learning rate; at least 0. A number or
        a schedule.
      mask: Which leaves decay: a tree of booleans, or a function from the parameters to it.
      orthogonalized: Which leaves are hidden matrices: a tree of booleans, or a function from the
        parameters, and at updates from the gradients, to it; None for `hidden_matrices`.
        `muon_report` tells what becomes of each.
      nesterov: Nesterov's momentum, of all parameters, as in Optax's Muon.
      newton_schulz_steps: Of the iteration that makes directions orthogonal; None for 5.
      second_moment: Of the directions: "neurons" for one number for each output of a matrix
        (`scale_by_neuron_moment`), True for factors, False for none, as in Muon: an RMS of about
        0.2 then. The settings from `initial_rank` on are for all
        other parameters, and for directions where there are factors.
      cautious_weight_decay: Decay only entries that the update shrinks, too
        (`add_cautious_weight_decay`).
      adapprox_b1: Decay of the running average of updates of all other parameters, in [0, 1).
      adapprox_learning_rate_scale: Learning rate of all other parameters, as a multiple of
        `learning_rate`; above 0.
      initial_rank: This and what follows is as in `scale_by_adapprox`.
      max_rank: As there.
      error_threshold: As there.
      rank_interval: As there.
      rank_growth: As there.
      power_iterations: As there.
      oversampling: As there.
      rotate: As there.
      warm_start: As there.
      approximate: As there.
      orthogonalization: As there.
      min_dim_size_to_factor: As there. Above all sides, with `second_moment=True`, the directions
        have a dense second moment, as in AdaMuon.
      weight_dimension_numbers: As there. It also says which matrices become orthogonal. A function
        is called on trees with `optax.MaskedNode` instead of some leaves.
      factor_dtype: As there.
      key: As there.

    Returns:
      An `optax.GradientTransformation`. Under `optax.inject_hyperparams` give
      `static_args=MUON_STATIC_ARGS`, and of bfloat16 parameters `hyperparam_dtype=jnp.float32`.

    Raises:
      ValueError: an argument is out of range.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, adapprox_jax
      >>> params = {"embedding": jnp.ones((512, 64)), "mlp": jnp.ones((64, 256))}
      >>> tx = adapprox_jax.adapprox_muon(learning_rate=1e-2, weight_decay=0.1)
      >>> state = tx.init(params)
      >>> grads = jax.tree.map(jnp.ones_like, params)
      >>> updates, state = tx.update(grads, state, params)
      >>> params = optax.apply_updates(params, updates)

    Source: Jordan et al., 2024, "Muon"; NorMuon (2510.05491) for the second moment by neurons;
    AdaMuon (2507.11005) for that of each entry, which the paper's factors stand for.
    docs/orthogonal.md.
    """
    require_precise("adapprox_b1", adapprox_b1)
    require("adapprox_b1", adapprox_b1, *DECAY)
    require("adapprox_learning_rate_scale", adapprox_learning_rate_scale, *POSITIVE)
    if b1 is None:
        b1 = momentum_by_rate(learning_rate, 0.9 if code_bits(mu_dtype) == 4 else 0.95)
    steps = 5 if newton_schulz_steps is None else newton_schulz_steps
    require_integer("newton_schulz_steps", steps, 1)
    numbers = weight_dimension_numbers
    factors = partial(scale_with, Settings.of(locals()), weight_dimension_numbers=numbers, key=key)
    hyperparameters = Hyperparameters(b2, eps, eps_root, False, error_threshold)
    clips = dataclasses.replace(hyperparameters, clipping_threshold=1.0)
    average = partial(
        average_unless_zero, nesterov=nesterov, mu_dtype=mu_dtype, weight_dimension_numbers=numbers
    )
    select = partial(resolve_selection, orthogonalized, weight_dimension_numbers=numbers)
    hidden = optax.chain(
        average(b1, of_gradients=True, rounding="nearest"),
        orthogonalize(steps, numbers),
        *_scaled(second_moment, hyperparameters, numbers, factors),
    )
    others = optax.chain(
        factors(clips, twice=reads_twice(adapprox_b1, mu_dtype)),
        average(adapprox_b1),
        optax.scale(adapprox_learning_rate_scale),
    )
    decay = decay_and_rate(learning_rate, weight_decay, mask, cautious_weight_decay)
    return named_chain("adapprox_muon", _partition(hidden, others, select), *decay)


def _scaled(
    second_moment: bool | Literal["neurons"],
    hyperparameters: Hyperparameters,
    weight_dimension_numbers: WeightDimensionNumbers,
    factors: Callable[[Hyperparameters], optax.GradientTransformation],
) -> list[optax.GradientTransformation]:
    """What scales directions: a second moment if there is one, to a root mean square of 0.2."""
    require_choice("second_moment", second_moment, (True, False, "neurons"))
    if second_moment == "neurons":
        b2, eps = hyperparameters.b2, hyperparameters.eps
        if callable(b2):
            raise ValueError(
                "b2 is a function and second_moment 'neurons'; allowed: a number, or"
                " second_moment=True or False."
            )
        return [scale_by_neuron_moment(b2, eps, weight_dimension_numbers, matrix_rms=RMS)]
    if second_moment:
        return [factors(hyperparameters), scale_to_matrix_rms(RMS, weight_dimension_numbers)]
    return [optax.scale(RMS)]


def _partition(
    hidden: optax.GradientTransformation,
    others: optax.GradientTransformation,
    select: Callable[[Any], Any],
) -> optax.GradientTransformation:
    """One transformation for hidden matrices, and another for all other parameters."""

    def labels(tree: Any) -> Any:
        return jax.tree.map(lambda is_hidden: HIDDEN if is_hidden else OTHERS, select(tree))

    parts = optax.partition({HIDDEN: hidden, OTHERS: others}, labels)

    def update(updates: optax.Updates, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params  # not needed, and they may be a model with other leaves
        check_state(state, optax.PartitionState, "adapprox_muon")
        return parts.update(updates, state)

    return optax.GradientTransformation(parts.init, update)
