"""Adapprox for JAX and Optax: Adam with an adaptive low-rank second moment."""

from adapprox_jax.accumulate import accumulate
from adapprox_jax.linalg.quantization import dequantize, quantize
from adapprox_jax.linalg.srsi import srsi
from adapprox_jax.optimizers.adapprox import PAPER, adapprox
from adapprox_jax.optimizers.adapprox_muon import adapprox_muon
from adapprox_jax.params.head_by_head import head_by_head
from adapprox_jax.params.hidden_matrices import hidden_matrices, muon_report
from adapprox_jax.params.matrix_view import MatrixDimensionNumbers
from adapprox_jax.schedules import increasing_decay, sigmoid_growth
from adapprox_jax.settings import MUON_STATIC_ARGS, STATIC_ARGS
from adapprox_jax.sharding.state_shardings import state_shardings, state_specs
from adapprox_jax.state.from_adam import from_adam
from adapprox_jax.state.layout import ScaleByAdapproxState
from adapprox_jax.state.report import RankInfo, rank_report, state_nbytes
from adapprox_jax.state.resize import grow, resize
from adapprox_jax.transforms.guided_ema import GuidedEmaState, guided_ema
from adapprox_jax.transforms.matrix_rms import clip_by_matrix_rms, scale_to_matrix_rms
from adapprox_jax.transforms.neuron_moment import ScaleByNeuronMomentState, scale_by_neuron_moment
from adapprox_jax.transforms.orthogonalize import orthogonalize
from adapprox_jax.transforms.scale_by_adapprox import scale_by_adapprox
from adapprox_jax.transforms.split_weights import (
    SplitWeightsState,
    join_weights,
    split,
    split_weights,
)
from adapprox_jax.transforms.stochastic_rounding import (
    StochasticRoundingState,
    stochastic_rounding,
)
from adapprox_jax.transforms.weight_decay import (
    add_cautious_weight_decay,
)

__version__ = "0.2.0"

__all__ = [
    "MUON_STATIC_ARGS",
    "PAPER",
    "STATIC_ARGS",
    "GuidedEmaState",
    "MatrixDimensionNumbers",
    "RankInfo",
    "ScaleByAdapproxState",
    "ScaleByNeuronMomentState",
    "SplitWeightsState",
    "StochasticRoundingState",
    "accumulate",
    "adapprox",
    "adapprox_muon",
    "add_cautious_weight_decay",
    "clip_by_matrix_rms",
    "dequantize",
    "from_adam",
    "grow",
    "guided_ema",
    "head_by_head",
    "hidden_matrices",
    "increasing_decay",
    "join_weights",
    "muon_report",
    "orthogonalize",
    "quantize",
    "rank_report",
    "resize",
    "scale_by_adapprox",
    "scale_by_neuron_moment",
    "scale_to_matrix_rms",
    "sigmoid_growth",
    "split",
    "split_weights",
    "srsi",
    "state_nbytes",
    "state_shardings",
    "state_specs",
    "stochastic_rounding",
]
