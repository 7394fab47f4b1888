"""Adapprox for JAX and Optax: Adam with an adaptive low-rank second moment."""

from adapprox_jax.clipping import clip_by_matrix_rms
from adapprox_jax.inspect import RankInfo, rank_report, state_nbytes
from adapprox_jax.low_rank import srsi
from adapprox_jax.matrix_view import MatrixDimensionNumbers
from adapprox_jax.momentum import GuidedEmaState, guided_ema
from adapprox_jax.optimizer import PAPER, STATIC_ARGS, adapprox
from adapprox_jax.rank import sigmoid_growth
from adapprox_jax.second_moment import ScaleByAdapproxState, scale_by_adapprox

__all__ = [
    "PAPER",
    "STATIC_ARGS",
    "GuidedEmaState",
    "MatrixDimensionNumbers",
    "RankInfo",
    "ScaleByAdapproxState",
    "adapprox",
    "clip_by_matrix_rms",
    "guided_ema",
    "rank_report",
    "scale_by_adapprox",
    "sigmoid_growth",
    "srsi",
    "state_nbytes",
]
