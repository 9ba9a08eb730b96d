"""Each key expires once, however they come."""

from __future__ import annotations

import asyncio

from areal_lite.infra.deadlines import Deadlines


def test_keys_expire_in_order_and_later_ones_after_all_have() -> None:
    async def run() -> None:
        expired: asyncio.Queue[str] = asyncio.Queue()
        deadlines = Deadlines(0.01, expired.put_nowait)
        for keys in ("abc", "de"):
            for key in keys:
                deadlines.add(key)
            deadlines.discard("b")
            for key in keys.replace("b", ""):
                assert await asyncio.wait_for(expired.get(), 10) == key
            assert not deadlines.pending()

    asyncio.run(run())
