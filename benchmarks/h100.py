"""Compiles programs for an H100 that need not be there, from a description of the device.

This needs Python 3.12 with `jax-cuda12-plugin`, `jax-cuda12-pjrt` and `nvidia-cuda-nvcc-cu12`
(`make device-program` installs them), and neither CUDA's libraries nor a GPU.
"""

import importlib.util
import math
from typing import Any

import jax
from jax.experimental import topologies

from benchmarks.program_counts import count

# From the data sheet and CUDA's occupancy tables.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84978434048
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def is_available() -> bool:
    """Whether JAX's plugin for CUDA, which has the compiler, is installed."""
    return importlib.util.find_spec("jax_cuda12_plugin") is not None


def mesh_of_h100s(shape: tuple[int, ...], names: tuple[str, ...]) -> jax.sharding.Mesh:
    """A mesh of H100s that need not be there, eight to a host.

    Args:
      shape: Devices along each axis.
      names: Names of the axes.
    """
    devices = math.prod(shape)
    described = topologies.get_topology_desc(
        platform="cuda",
        topology_name="h100",
        topology=f"1x{-(-devices // 8)}x{min(devices, 8)}",
        target_config=H100,
    )
    return topologies.make_mesh(described, shape, names)


def figures(compiled: Any) -> dict[str, Any]:
    """What one execution of a program does; the longest branch is a step that chooses ranks."""
    text = compiled.as_text()
    counts, longest = count(text), count(text, max)
    return {
        "kernels": counts.kernels,
        "library_calls": counts.library_calls,
        "library_calls_of_longest_branch": longest.library_calls,
        "decompositions": longest.decompositions,
        "branches": longest.branches,
        "loops_of_unknown_length": longest.loops_of_unknown_length,
        "gb_moved": counts.nbytes / 1e9,
        "ms": 1e3 * counts.seconds,
        "ms_of_longest_branch": 1e3 * longest.seconds,
    }
