"""The accelerator of this machine."""

import subprocess
import sys

_ASK = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind)"


def require_accelerator(cpu: bool) -> str:
    """The kind of device that JAX uses here.

    Another process looks for it, because JAX would keep most of a GPU's memory, which the processes
    that measure need.

    Args:
      cpu: Whether a CPU is enough.

    Raises:
      SystemExit: If there is no accelerator and a CPU is not enough.
    """
    answer = subprocess.run(
        [sys.executable, "-c", _ASK], check=True, stdout=subprocess.PIPE, text=True
    )
    platform, kind = answer.stdout.strip().split(maxsplit=1)
    if platform == "cpu" and not cpu:
        raise SystemExit("JAX sees no accelerator here; --cpu takes the CPU.")
    return kind
