"""What holds for all tests of compiled code under a limit."""

from __future__ import annotations

import pytest

from lowtide import _compat
from once import on_one_recorder

compiles = [
    on_one_recorder,
    # torch's own warnings, while it compiles
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("one_thread", "fresh_compiler"),
    pytest.mark.skipif(not _compat.torch_has((2, 13)), reason="refused on this torch"),
]
