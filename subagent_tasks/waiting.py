"""Everything a process waits for, on one pub/sub connection: outcomes of runs, and the doorbell of notices.

A session's channel says that something ended. The outcome travels with it when it is small; otherwise its record is
read. After every reconnection, and now and then in case a message was lost, all that is waited for is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Generator
from typing import Any

from subagent_tasks.errors import BrokerUnavailable, CallerError
from subagent_tasks.logs import event_logger
from subagent_tasks.protocol.keys import Keys
from subagent_tasks.protocol.models import Outcome
from subagent_tasks.store.doorbell import Doorbell
from subagent_tasks.store.runs import RunStore

logger = event_logger(__name__)

BATCH = 500
"""How many records are read in one round trip."""

CLOSE_SECONDS = 1.0
"""How long those who wait when the process stops get to withdraw what they wait for."""


class Waiting:
    """Outcomes and notices of the sessions attached here."""

    def __init__(self, *, runs: RunStore, doorbell: Doorbell, keys: Keys, recheck_seconds: float) -> None:
        self._runs = runs
        self._doorbell = doorbell
        self._keys = keys
        self._recheck_seconds = recheck_seconds
        self._futures: dict[str, asyncio.Future[Outcome]] = {}
        # run id -> how many wait for it: whoever gives up first leaves the future to the others
        self._waiters: Counter[str] = Counter()
        self._bells: dict[str, set[asyncio.Event]] = {}
        # owner and run id -> how many read the run for its owner now
        self._readings: Counter[tuple[str, str]] = Counter()
        self._readings_ended = 0
        # session id -> how many open it here: each reader of its notices is one
        self._attached: Counter[str] = Counter()
        self._nobody_waits = asyncio.Event()
        self._nobody_waits.set()
        self._must_look = asyncio.Event()
        self._to_look: set[str] = set()
        self._look_at_all = False

    async def attach(self, session_id: str) -> None:
        """Hear of this session's endings; returns once nothing can be missed any more."""
        self._bells.setdefault(session_id, set())
        # Counted first: somebody who leaves meanwhile must not end the listening.
        self._attached[session_id] += 1
        try:
            await self._doorbell.listen(
                self._keys.session_channel(session_id), lambda text: self._on_message(session_id, text)
            )
        except BaseException:
            await self.detach(session_id)
            raise

    async def detach(self, session_id: str) -> None:
        """Stop listening, once everybody who attached has left; whoever reads notices looks whether it goes on."""
        self._ring(session_id)
        self._attached[session_id] -= 1
        if self._attached[session_id] > 0:
            return
        del self._attached[session_id]
        self._bells.pop(session_id, None)
        await self._doorbell.leave(self._keys.session_channel(session_id))

    def expect(self, run_id: str) -> asyncio.Future[Outcome]:
        """A future of the run's outcome. Ask before the run is admitted and nothing is missed."""
        future = self._futures.get(run_id)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            self._futures[run_id] = future
        self._waiters[run_id] += 1
        self._nobody_waits.clear()
        return future

    def is_expected(self, run_id: str) -> bool:
        """Whether somebody in this process waits for the run."""
        return self._waiters[run_id] > 0

    def forget(self, run_id: str) -> None:
        """One of those who expected the run waits no more."""
        self._waiters[run_id] -= 1
        if self._waiters[run_id] > 0:
            return
        del self._waiters[run_id]
        if not self._waiters:
            self._nobody_waits.set()
        future = self._futures.pop(run_id, None)
        if future is not None and not future.cancel() and not future.cancelled():
            future.exception()  # looked at: nobody is left to be told of it

    def look(self, run_id: str) -> None:
        """Read the run's record soon: it may have ended before it was expected."""
        self._to_look.add(run_id)
        self._must_look.set()

    async def close(self) -> None:
        """Nothing will be heard any more: end every wait, and give those who waited a moment to draw conclusions."""
        for run_id, future in self._futures.items():
            if not future.done():
                future.set_exception(
                    CallerError(
                        f"the host stopped before run {run_id} ended: a job goes on, a foreground run ends with its "
                        "caller; open a host again to go on",
                        code="HOST_STOPPED",
                    )
                )
        for session_id in self._bells:
            self._ring(session_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._nobody_waits.wait()

    def add_bell(self, session_id: str) -> asyncio.Event:
        """An event set whenever the session may have a new notice."""
        bell = asyncio.Event()
        self._bells.setdefault(session_id, set()).add(bell)
        return bell

    def remove_bell(self, session_id: str, bell: asyncio.Event) -> None:
        self._bells.get(session_id, set()).discard(bell)

    @contextlib.contextmanager
    def reading(self, run_id: str, *, session_id: str) -> Generator[None]:
        """Meanwhile the job's notice is held back here: who is told its end by the reading is not told again.

        Withdrawing it in the reading's script is not enough: a reader may have fetched it just before.
        """
        key = (session_id, run_id)
        self._readings[key] += 1
        try:
            yield
        finally:
            self._readings[key] -= 1
            if not self._readings[key]:
                del self._readings[key]
            self._readings_ended += 1
            self._ring(session_id)

    @property
    def readings_ended(self) -> int:
        """Whoever fetched a notice while this changed fetches it again: it may have been withdrawn."""
        return self._readings_ended

    def is_being_read(self, run_id: str, *, session_id: str) -> bool:
        """Whether its notice is to be held back; its owner's bells ring when that is over."""
        return (session_id, run_id) in self._readings

    async def run(self) -> None:
        """Read what may have been missed: when asked, and every so often."""
        while True:
            try:
                async with asyncio.timeout(self._recheck_seconds):
                    await self._must_look.wait()
            except TimeoutError:
                self._look_at_all = True
                # The periodic look is for notices too: a lost message must not cost more than this.
                for bells in self._bells.values():
                    for bell in bells:
                        bell.set()
            self._must_look.clear()
            looking, self._to_look = self._to_look, set()
            everything, self._look_at_all = self._look_at_all, False
            try:
                await self._recheck([*self._futures] if everything else [*looking])
            except BrokerUnavailable:
                # Asked for now, it is read with all the others when the time comes.
                continue
            except Exception as error:
                logger.error("recheck failed", extra={"error": type(error).__name__})

    async def _recheck(self, run_ids: list[str]) -> None:
        waited_for = [run_id for run_id in run_ids if (known := self._futures.get(run_id)) and not known.done()]
        for start in range(0, len(waited_for), BATCH):
            batch = waited_for[start : start + BATCH]
            for run_id, outcome in zip(batch, await self._runs.outcomes(batch), strict=True):
                if outcome is not None:
                    self._resolve(run_id, outcome)

    def _on_message(self, session_id: str, text: str | None) -> None:
        if text is None:
            self._look_at_all = True
            self._must_look.set()
            self._ring(session_id)
            return
        message: dict[str, Any] = json.loads(text)
        if "notice" in message:
            self._ring(session_id)
        elif (run_id := message.get("settled")) in self._futures:
            if message["outcome"] is None:
                self.look(run_id)
            else:
                self._resolve(run_id, Outcome.model_validate(message["outcome"]))

    def _ring(self, session_id: str) -> None:
        for bell in self._bells.get(session_id, ()):
            bell.set()

    def _resolve(self, run_id: str, outcome: Outcome) -> None:
        future = self._futures.get(run_id)
        if future is not None and not future.done():
            future.set_result(outcome)
