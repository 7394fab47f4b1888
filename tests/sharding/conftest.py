import jax
import pytest

from tests.common import mesh_of


@pytest.fixture
def mesh():
    """Eight devices along two axes, in use."""
    mesh = mesh_of((2, 4), ("x", "y"))
    with jax.set_mesh(mesh):
        yield mesh
