"""Both schedules of a step."""

import pytest


@pytest.fixture(params=["CPU", "accelerator"])
def way(request):
    """One leaf after the other, as on CPUs, or all in phases."""
    if request.param == "accelerator":
        request.getfixturevalue("in_phases")()
    return request.param
