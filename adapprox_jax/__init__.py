"""Adapprox for JAX and Optax: Adam with an adaptive low-rank second moment."""

from adapprox_jax.clipping import clip_by_matrix_rms, scale_to_matrix_rms
from adapprox_jax.from_adam import from_adam
from adapprox_jax.growth import sampling_threshold, sigmoid_growth
from adapprox_jax.hidden import hidden_matrices, muon_report
from adapprox_jax.inspect import RankInfo, rank_report, state_nbytes
from adapprox_jax.low_rank import srsi
from adapprox_jax.matrix_view import MatrixDimensionNumbers
from adapprox_jax.momentum import GuidedEmaState, guided_ema
from adapprox_jax.muon import adapprox_muon
from adapprox_jax.neurons import ScaleByNeuronMomentState, scale_by_neuron_moment
from adapprox_jax.optimizer import PAPER, adapprox
from adapprox_jax.orthogonal_directions import orthogonalize
from adapprox_jax.quantization import dequantize, quantize
from adapprox_jax.resize import grow, resize
from adapprox_jax.second_moment import scale_by_adapprox
from adapprox_jax.second_moment_decay import increasing_decay
from adapprox_jax.settings import MUON_STATIC_ARGS, STATIC_ARGS
from adapprox_jax.state import ScaleByAdapproxState
from adapprox_jax.state_shardings import state_shardings
from adapprox_jax.weight_decay import add_cautious_weight_decay

__version__ = "0.1.0"

__all__ = [
    "MUON_STATIC_ARGS",
    "PAPER",
    "STATIC_ARGS",
    "GuidedEmaState",
    "MatrixDimensionNumbers",
    "RankInfo",
    "ScaleByAdapproxState",
    "ScaleByNeuronMomentState",
    "adapprox",
    "adapprox_muon",
    "add_cautious_weight_decay",
    "clip_by_matrix_rms",
    "dequantize",
    "from_adam",
    "grow",
    "guided_ema",
    "hidden_matrices",
    "increasing_decay",
    "muon_report",
    "orthogonalize",
    "quantize",
    "rank_report",
    "resize",
    "sampling_threshold",
    "scale_by_adapprox",
    "scale_by_neuron_moment",
    "scale_to_matrix_rms",
    "sigmoid_growth",
    "srsi",
    "state_nbytes",
    "state_shardings",
]
