"""A worker process: what lives on the pool's event loop, from the first heartbeat to the last release."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
from collections.abc import Callable, Mapping

from broker_config import BrokerSettings, queue_name
from subagent_tasks.errors import SubagentError
from subagent_tasks.execution import Executor
from subagent_tasks.logs import event_logger
from subagent_tasks.process import Process
from subagent_tasks.protocol.interfaces import ChildTools, Provider
from subagent_tasks.protocol.ports import Publisher, RunListener
from subagent_tasks.queue.control import install_revoke, uninstall_revoke
from subagent_tasks.store.processes import BeatAnswer
from subagent_tasks.tools.calls import Tool, ToolServices
from subagent_tasks.tools.child_tools import ChildToolMaker

logger = event_logger(__name__)

KILL_SECONDS = 5.0
"""How long Celery's `revoke` may wait for our kill: it is asked in the worker's main thread."""


class WorkerDriver:
    """Serves activations of one app in this process: the pool starts it, hands it runs, and asks it to let go."""

    def __init__(
        self,
        settings: BrokerSettings,
        *,
        providers: dict[str, Provider],
        tools: ChildTools,
        own_tools: Callable[[], Mapping[str, Tool]],
        listener: RunListener,
        exit_on_stall: bool = True,
    ) -> None:
        self._settings = settings
        self.shutdown_grace_seconds = settings.shutdown_grace_seconds
        self._providers = providers
        self._tools = tools
        self._own_tools = own_tools
        self._listener = listener
        self._exit_on_stall = exit_on_stall
        self.publisher: Publisher | None = None
        self._process: Process | None = None
        self._executor: Executor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Before the first message: prove life. Raises `BrokerUnavailable` when Redis does not answer."""
        assert self.publisher is not None, "the app sets the publisher"
        queues = sorted({queue_of(provider, self._settings.namespace) for provider in self._providers.values()})
        process = Process(self._settings, role="worker", publisher=self.publisher, queues=queues)
        services = ToolServices(
            delegation=process.delegation,
            waiting=process.waiting,
            settings=self._settings,
            new_id=process.ids.new,
        )
        executor = Executor(
            runs=process.runs,
            providers=self._providers,
            tools_of=ChildToolMaker(self._tools, self._own_tools(), services).tools_of,
            settler=process.settler,
            publisher=self.publisher,
            settings=self._settings,
            process_id=process.id,
            ids=process.ids,
            listener=self._listener,
        )

        def on_beat(answer: BeatAnswer) -> None:
            executor.on_beat(flagged=answer.flagged, driven=answer.driven)

        for name, provider in self._providers.items():
            try:
                await provider.prepare()
            except SubagentError as error:
                logger.warning("provider cannot run a child yet", extra={"provider": name, "why": error})
            except Exception as error:
                # Its first run will say what is wrong; the other providers' runs must not wait for that.
                logger.warning("provider not prepared", extra={"provider": name, "error": type(error).__name__})
        await process.start(
            on_ring=executor.ring,
            on_beat=on_beat,
            on_outage=executor.on_outage,
            on_stall=self._on_stall,
            on_pulse=self._rearm,
        )
        self._process, self._executor, self._loop = process, executor, asyncio.get_running_loop()
        install_revoke(self._kill_by_revoke)

    async def activate(self, run_id: str, queue: str) -> None:
        """One Celery message."""
        assert self._executor is not None, "the pool starts the driver before the first message"
        await self._executor.activate(run_id, queue)

    async def release(self) -> None:
        """Hand every run back, so that other workers go on with them at once."""
        if self._executor is not None:
            await self._executor.release_all()

    async def stop(self) -> None:
        uninstall_revoke()
        if self._exit_on_stall:
            faulthandler.cancel_dump_traceback_later()
        if self._process is not None:
            await self._process.stop()
            self._process = None

    def _kill_by_revoke(self, task_id: str, terminate: bool) -> bool:
        """Celery's revoke, from Flower or `celery control`: a kill of ours, or not our id. Runs off the loop."""
        if self._loop is None or self._process is None:
            return False
        asked = asyncio.run_coroutine_threadsafe(self._kill(self._process, task_id), self._loop)
        return asked.result(KILL_SECONDS)

    async def _kill(self, process: Process, task_id: str) -> bool:
        record = await process.runs.get(task_id)
        if record is None:
            return False
        # Running ones too, with `terminate` or without: a revoke that is answered and changes nothing would be a lie.
        await process.delegation.kill(task_id, authority="", reason="revoked")
        return True

    def _rearm(self) -> None:
        """Code that keeps the GIL stops every thread of Python; faulthandler's is none, and ends the process."""
        if self._exit_on_stall and sys.__stderr__ is not None:
            # A lease later: a loop that merely hangs is the heartbeat's to end, which can say so.
            seconds = self._settings.loop_stall_seconds + self._settings.lease_seconds
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)

    def _on_stall(self) -> None:
        if self._exit_on_stall:
            if sys.__stderr__ is not None:
                # Names of files and functions alone: where it hangs.
                faulthandler.dump_traceback(file=sys.__stderr__)
            # Nothing else of this process can be trusted to end it; its supervisor starts a new one.
            os._exit(70)


def queue_of(provider: Provider, namespace: str) -> str:
    """The Celery queue in which a provider's runs wait."""
    return queue_name(namespace, provider.queue or provider.name)
