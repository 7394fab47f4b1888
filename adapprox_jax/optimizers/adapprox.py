"""adapprox: the whole optimizer as a chain, and the settings of the paper."""

from typing import Any

import jax
import optax

from adapprox_jax.argument_checks import require, require_flag
from adapprox_jax.linalg.orthonormalize import Orthogonalization
from adapprox_jax.optimizers.named_chain import named_chain
from adapprox_jax.params.views import WeightDimensionNumbers
from adapprox_jax.schedules import PAPERS_GROWTH, RankGrowth, begins_at_zero
from adapprox_jax.settings import Hyperparameters, Settings
from adapprox_jax.step.approximation import Approximate
from adapprox_jax.transforms.guided_ema import average_unless_zero, reads_twice
from adapprox_jax.transforms.scale_by_adapprox import scale_with
from adapprox_jax.transforms.weight_decay import decay_and_rate

# The second-moment keywords with the paper's values and Algorithm 1 as printed. Guidance, rates and
# decays are not among them.
PAPER: dict[str, Any] = {
    "initial_rank": 1,
    "max_rank": 0.25,
    "error_threshold": 0.01,
    "rank_interval": 10,
    "rank_growth": PAPERS_GROWTH,
    "power_iterations": 5,
    "oversampling": 5,
    "rotate": False,
    "warm_start": False,
    "approximate": "moment",
    "orthogonalization": "qr",
    "min_dim_size_to_factor": 1,
}


def adapprox(
    learning_rate: optax.ScalarOrSchedule,
    b1: optax.ScalarOrSchedule = 0.9,
    b2: optax.ScalarOrSchedule = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: jax.typing.DTypeLike | None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    *,
    clipping_threshold: jax.typing.ArrayLike | None = 1.0,
    cosine_guidance: bool = False,
    guidance_max_scale: jax.typing.ArrayLike = 10.0,
    nesterov: bool | None = None,
    bias_correction: bool = False,
    cautious_weight_decay: bool = False,
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
    """Adam with a low-rank second moment: stands where `optax.adamw` stood.

    The chain of `scale_by_adapprox` with `clip_by_matrix_rms` in one step, `guided_ema`,
    `optax.add_decayed_weights` or `add_cautious_weight_decay`, and `optax.scale_by_learning_rate`.
    The running average is of the clipped updates, not of the gradients. Nesterov's momentum looks
    one step ahead of it, and corrects it for its start in zero.

    Args:
      learning_rate: A number or a schedule.
      b1: Decay of the running average of updates, in [0, 1), or a function from the step, from 1,
        to it. With 0 none is kept.
      b2: Decay of the second moment, in [0, 1), or a function from the step to it, as
        `increasing_decay` gives.
      eps: Added to the root of the second moment, and to 1 - cos in the guidance; at least 0.
      eps_root: Added under the root, at least 0.
      mu_dtype: Type of the running average; None for that of the parameters, int8, "int5" or int4
        for codes with scales (see `guided_ema`).
      weight_decay: Decoupled weight decay, multiplied by the learning rate; at least 0. A number or
        a schedule.
      mask: Which leaves decay: a tree of booleans, or a function from the parameters to it.
      clipping_threshold: d, the largest root mean square of the update of a matrix, above 0. None
        is no clipping, which needs `bias_correction`, or a b2 that is a function and begins at 0.
      cosine_guidance: Scale the average up where the update agrees with it. It acts mostly as a
        higher learning rate: with it the best rate is about half.
      guidance_max_scale: The largest such factor, at least 1.
      nesterov: Nesterov's momentum, as in `guided_ema`. None for True, but False with guidance, as
        the paper has it. Without it the best rate is lower.
      bias_correction: Divide the second moment by 1 - b2^t.
      cautious_weight_decay: Decay only entries that the update shrinks, too
        (`add_cautious_weight_decay`).
      initial_rank: k_init; None for a fixed rank. This and what follows is explained at
        `scale_by_adapprox`; `**PAPER` gives the paper's values of these.
      max_rank: k_max, an int or a fraction of min(m, n).
      error_threshold: The rank grows while the relative error is above it; a number or a function
        from the step to one.
      rank_interval: Steps between choices of the rank.
      rank_growth: From the error to the columns to add; None for `sigmoid_growth()`.
      power_iterations: l, passes of the subspace iteration.
      oversampling: p, columns worked on beyond the rank.
      rotate: Keep the best of the columns worked on.
      warm_start: Start from the last factors.
      approximate: "moment" or "root": what is factored.
      orthogonalization: "qr" or "cholesky".
      min_dim_size_to_factor: Leaves with fewer rows or columns stay dense.
      weight_dimension_numbers: `MatrixDimensionNumbers` of leaves that are not plain matrices.
      factor_dtype: Type of the factors.
      key: Seed or JAX random key of the Gaussian starts.

    Returns:
      An `optax.GradientTransformation`. Under `optax.inject_hyperparams` the arguments that decide
      shapes or code must be static where they are given:
      `inject_hyperparams(adapprox, static_args=STATIC_ARGS)`. Of bfloat16 parameters give
      `hyperparam_dtype=jnp.float32`, too.

    Raises:
      ValueError: an argument is out of range, or updates are neither clipped nor without bias.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, adapprox_jax
      >>> params = {"kernel": jnp.ones((256, 512)), "bias": jnp.zeros(512)}
      >>> tx = adapprox_jax.adapprox(learning_rate=1e-3, weight_decay=0.1)
      >>> state = tx.init(params)
      >>> grads = jax.tree.map(jnp.ones_like, params)
      >>> updates, state = tx.update(grads, state, params)
      >>> params = optax.apply_updates(params, updates)

    Source: paper, Algorithm 3; the deviations are in docs/algorithm.md.
    """
    settings = Settings.of(locals())
    hyperparameters = Hyperparameters(
        b2, eps, eps_root, bias_correction, error_threshold, clipping_threshold
    )
    require_flag("cosine_guidance", cosine_guidance)
    allowed = "a number of at least 1"
    require("guidance_max_scale", guidance_max_scale, lambda x: x >= 1, allowed)
    if clipping_threshold is None and not (bias_correction or begins_at_zero(b2)):
        raise ValueError(
            "clipping_threshold is None and bias_correction is False; allowed: a threshold or"
            " bias_correction=True or b2=increasing_decay(), because the first updates would be"
            " 1 / sqrt(1 - b2) in size."
        )
    average = average_unless_zero(
        b1,
        cosine_guidance=cosine_guidance,
        eps=eps,
        max_scale=guidance_max_scale,
        mu_dtype=mu_dtype,
        nesterov=not cosine_guidance if nesterov is None else nesterov,
        weight_dimension_numbers=weight_dimension_numbers,
    )
    twice = reads_twice(b1, mu_dtype) and not cosine_guidance  # which reads them once more
    scaled = scale_with(settings, hyperparameters, weight_dimension_numbers, key, twice=twice)
    decay = decay_and_rate(learning_rate, weight_decay, mask, cautious_weight_decay)
    return named_chain("adapprox", scaled, average, *decay)
