"""What several unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llmx.kernels import cpu


@pytest.fixture(params=["portable", "avx2", "avx512", "avx512bf16"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of the C++ kernels, switched to."""
    library = cpu.native()
    assert library is not None
    if request.param not in library.isas():
        pytest.skip(f"this processor or build has no {request.param}")
    before = library.active()
    library.use(request.param)
    yield request.param
    library.use(before)
