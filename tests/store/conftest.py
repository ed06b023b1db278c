"""The store over each kind of server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from store_kit import Store


@pytest.fixture
async def store(server: str) -> AsyncIterator[Store]:
    """All stores of one namespace on an empty server."""
    store = Store(server)
    yield store
    await store.close()
