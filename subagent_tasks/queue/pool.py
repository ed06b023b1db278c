"""The worker pool: every activation is a coroutine on one event loop; other tasks run in threads.

Decides when a message may start (the cap), where it runs, and what Celery is told when it ends. It knows no Redis key
and no run state: an activation settles its own run, and whatever serves activations (heartbeat, doorbell, drives) is
one `Lifecycle` object that this pool starts before the first message and asks to hand everything back before the last.

All bookkeeping happens in the worker's main thread. The loop and the task threads only post calls to it, through a
mailbox with one wake-up per batch, so there is no lock to hold inside a signal handler.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import inspect
import itertools
import logging
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from billiard.einfo import ExceptionInfo  # pyright: ignore[reportMissingTypeStubs]
from celery.concurrency.base import BasePool  # pyright: ignore[reportMissingTypeStubs]
from celery.exceptions import SoftTimeLimitExceeded, WorkerLostError  # pyright: ignore[reportMissingTypeStubs]

from subagent_tasks.errors import SubagentError
from subagent_tasks.queue.activation import LIFECYCLE_ATTRIBUTE, Lifecycle

logger = logging.getLogger(__name__)

POOL_PATH = "subagent_tasks.queue.pool:AsyncioPool"
Outcome = tuple[int, Any, float]  # what Celery calls (failed, retval, runtime)
DEFAULT_GRACE_SECONDS = 10.0
CANCEL_GRACE_SECONDS = 1.0  # what a drive that ignored its release gets to unwind after it was cancelled
LOOP_JOIN_SECONDS = 5.0
CONSUMER_STOP_SECONDS = 3.0  # what Celery's consumer may take to stop, beside the grace


def refuse(message: str) -> None:
    """End the start of this worker: one line in its log, exit code 1, no traceback."""
    logger.critical(message)
    raise SystemExit(1)


class AsyncioPool(BasePool):
    """At most `limit` (`-c`) tasks at once in one process: activations as coroutines, the rest in threads.

    * An activation (`Task.is_activation`) is accepted, run on the loop without Celery's tracer, and reported as
      succeeded; Celery's time limits and terminate do not reach it.
    * Any other task runs through Celery's tracer in a thread of its own. If its function returns a coroutine, that is
      awaited on the loop (a coroutine is never stored as a result); soft and hard time limits and terminate cancel it.
      A plain function can be neither timed out nor interrupted: a warning says so. `task.request` is the thread's, so
      it is not available inside such a coroutine.
    """

    app: Any
    limit: int
    options: dict[str, Any]
    signal_safe = False  # stopping waits for other threads
    body_can_be_buffer = True

    def on_start(self) -> None:
        if self.options.get("threads"):
            refuse("This worker needs a broker that Celery can poll, such as Redis, on a POSIX system.")
        self._accepting = True
        self._stopping = False
        self._impatient = False
        self._waiting: deque[_Job] = deque()
        self._activations: set[_Job] = set()
        self._foreign: dict[int, _Job] = {}
        self._pids = itertools.count(1 << 32)  # Celery hands it back to `terminate_job`; never a real process id
        self._warned: set[str] = set()
        self._current = threading.local()
        self._drives: set[asyncio.Task[None]] = set()
        self._hub: Any = None
        # A socket pair of our own: the hub's `call_soon` is safe from other threads only since kombu 5.7, and a byte
        # written while the worker reconnects is still there when it polls again.
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            # A signal alone does not end the hub's poll: without this a worker notices SIGTERM up to a second late.
            signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        self._to_hub = _Mailbox(lambda _: self._wake_hub())
        self._executor = concurrent.futures.ThreadPoolExecutor(self.limit, thread_name_prefix="task")
        self._loop_ended: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._loop_thread = self._start_loop()
        self._to_loop = _Mailbox(self._wake_loop)
        self._unwrap = _wrap_coroutine_tasks(self.app, self._bridge)
        self._release: concurrent.futures.Future[None] | None = None
        self._lifecycle = cast("Lifecycle | None", getattr(self.app, LIFECYCLE_ATTRIBUTE, None))
        self._grace_seconds = (
            DEFAULT_GRACE_SECONDS if self._lifecycle is None else self._lifecycle.shutdown_grace_seconds
        )
        self._watchdog = threading.Timer(self._grace_seconds + CONSUMER_STOP_SECONDS, _give_up)
        self._watchdog.daemon = True
        if self._lifecycle is not None:
            self._start_lifecycle(self._lifecycle)
        if threading.current_thread() is threading.main_thread():
            # Not where a test's process is the worker too.
            _spare_the_collector()

    def register_with_event_loop(self, loop: Any) -> None:
        """Called at the start and after each reconnection, when the hub has forgotten its readers."""
        self._hub = loop
        loop.add_reader(self._wake_reader, self._on_wake)

    def on_apply(
        self,
        target: Callable[..., Outcome],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        callback: Callable[..., object],
        accept_callback: Callable[..., object],
        timeout_callback: Callable[..., object],
        timeout: float | None = None,
        soft_timeout: float | None = None,
        **_: Any,
    ) -> None:
        """Take a message from the consumer, and start it as soon as a slot is free. `timeout`s are in seconds."""
        task = self.app.tasks[args[0]]
        job = _Job(
            task=task,
            task_id=args[1],
            request=args[2],
            activation=getattr(task, "is_activation", False),
            # With the app named: the tracer otherwise looks for the task in the process's current app.
            trace=partial(target, *args, **{"app": self.app, **(kwargs or {})}),
            on_accept=accept_callback,
            on_end=callback,
            on_timeout=timeout_callback,
            soft_seconds=soft_timeout or self.options.get("soft_timeout"),
            hard_seconds=timeout or self.options.get("timeout"),
            pid=next(self._pids),
        )
        self._waiting.append(job)
        self._fill()

    def terminate_job(self, pid: int, signal: object = None) -> None:
        """Cancel the coroutine of a task that is not ours. Ours have no such id: they are killed by flag and ring."""
        job = self._foreign.get(pid)
        if job is None:
            return
        job.stop = job.stop or "terminated"
        if job.coroutine is None:
            logger.warning("cannot interrupt %s[%s]: a plain function runs to its end", job.task.name, job.task_id)
        self._to_loop.put(job.cancel)

    def on_close(self) -> None:
        # The consumer is stopped next, which may take it a second; the runs are handed back meanwhile.
        self._accepting = False
        self._begin_release()
        if threading.current_thread() is threading.main_thread():
            # A broker that froze can hold the consumer's end up for ever; whoever sent SIGTERM expects an end.
            self._watchdog.start()

    def on_stop(self) -> None:
        self._shut_down(wait_for_foreign=True)

    def on_terminate(self) -> None:
        self._shut_down(wait_for_foreign=False)

    def _get_info(self) -> dict[str, Any]:
        return {
            **super()._get_info(),
            "activations": len(self._activations),
            "other-tasks": len(self._foreign),
            "waiting": len(self._waiting),
        }

    # Main thread: slots.

    def _fill(self) -> None:
        while self._accepting and self._waiting and len(self._activations) + len(self._foreign) < self.limit:
            self._start_job(self._waiting.popleft())

    def _start_job(self, job: _Job) -> None:
        if job.activation:
            self._activations.add(job)
        else:
            self._foreign[job.pid] = job
            self._warn_of_limits(job)
        job.started_at = time.monotonic()
        self._tell_celery(job, job.on_accept, job.pid, job.started_at)
        if job.activation:
            self._to_loop.put(partial(self._launch, job))
        else:
            self._executor.submit(self._trace, job)

    def _activation_ended(self, job: _Job, failure: str | None) -> None:
        self._activations.discard(job)
        runtime = time.monotonic() - job.started_at
        if failure is None:
            outcome = (0, "None", runtime)
        else:
            # Only the type: the text may quote a prompt or an output (P14).
            logger.error("activation %s[%s] raised %s", job.task.name, job.task_id, failure)
            outcome = (1, _exception_info(RuntimeError(f"the activation raised {failure}")), runtime)
        self._tell_celery(job, job.on_end, outcome)
        self._fill()

    def _foreign_ended(self, job: _Job, outcome: Outcome | None) -> None:
        self._foreign.pop(job.pid, None)
        if outcome is not None:
            self._tell_celery(job, job.on_end, outcome)
        self._fill()

    def _tell_celery(self, job: _Job, callback: Callable[..., object], *args: object) -> None:
        """A fault in Celery's bookkeeping of one task must cost neither its slot nor the worker."""
        try:
            callback(*args)
        except Exception as exc:
            logger.error("bookkeeping of %s[%s] failed: %s", job.task.name, job.task_id, type(exc).__name__)

    def _warn_of_limits(self, job: _Job) -> None:
        limited = job.soft_seconds or job.hard_seconds
        if limited and job.task.name not in self._warned and not _is_coroutine_function(job.task.run):
            self._warned.add(job.task.name)
            logger.warning(
                "time limits of %s are not enforced: this pool can only limit `async def` tasks", job.task.name
            )

    # Loop thread: activations.

    def _launch(self, job: _Job) -> None:
        drive = self._loop.create_task(self._drive(job))
        self._drives.add(drive)
        drive.add_done_callback(self._drives.discard)

    async def _drive(self, job: _Job) -> None:
        failure: str | None = None
        try:
            await job.task.run(*job.request["args"], **job.request["kwargs"])
        except BaseException as exc:  # even SystemExit: it would end the loop under every other activation
            failure = type(exc).__name__
        self._to_hub.put(partial(self._activation_ended, job, failure))

    # Task threads: everything that is not ours, through Celery's tracer.

    def _trace(self, job: _Job) -> None:
        self._current.job = job
        outcome: Outcome | None = None
        fatal: str | None = None
        try:
            outcome = job.trace()
        except _Abandoned:
            pass  # Celery already knows why
        except BaseException as exc:  # SystemExit and its like end a prefork child; a thread must report it
            fatal = type(exc).__name__
        self._current.job = None
        if fatal is not None:
            outcome = (1, _exception_info(WorkerLostError(f"the task raised {fatal}")), 0.0)
        self._to_hub.put(partial(self._foreign_ended, job, outcome))

    def _bridge(self, returned: object) -> object:
        """What a task's function returned, awaited if it is a coroutine. Runs in the task's thread."""
        job = cast("_Job | None", getattr(self._current, "job", None))
        if job is None or not inspect.iscoroutine(returned):
            return returned
        # Only the outermost call is ours to await: inside, a task may call another one and await it itself.
        self._current.job = None
        future = asyncio.run_coroutine_threadsafe(self._await_foreign(job, returned), self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if job.stop == "soft limit":
                raise SoftTimeLimitExceeded(job.soft_seconds) from None
            if job.stop is not None:
                raise _Abandoned from None
            raise

    async def _await_foreign(self, job: _Job, coroutine: Coroutine[Any, Any, object]) -> object:
        job.coroutine = asyncio.current_task()
        timers: list[asyncio.TimerHandle] = []
        for kind, seconds in (("soft limit", job.soft_seconds), ("hard limit", job.hard_seconds)):
            if seconds:
                timers.append(self._loop.call_later(seconds, self._on_limit, job, kind, seconds))
        if job.stop is not None:
            job.cancel()
        try:
            return await coroutine
        except (KeyboardInterrupt, SystemExit) as exc:
            raise WorkerLostError(f"the task raised {type(exc).__name__}") from exc
        finally:
            job.coroutine = None
            for timer in timers:
                timer.cancel()

    def _on_limit(self, job: _Job, kind: str, seconds: float) -> None:
        job.stop = kind
        job.cancel()
        self._to_hub.put(partial(self._tell_celery, job, job.on_timeout, kind == "soft limit", seconds))

    # Wake-ups.

    def _wake_hub(self) -> None:
        with contextlib.suppress(OSError):  # full: a wake-up is on its way; closed: nobody is left to wake
            self._wake_writer.send(b"\0")

    def _on_wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_reader.recv(4096)
        self._to_hub.drain()

    def _wake_loop(self, drain: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(drain)

    # Start and end.

    def _start_loop(self) -> threading.Thread:
        ready = threading.Event()

        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self._loop_ended = asyncio.Event()
            ready.set()
            await self._loop_ended.wait()

        def run() -> None:
            try:
                asyncio.run(main())
            finally:
                if not self._loop_ended.is_set():
                    # A task raised what ends a loop. A worker without one would take messages and drive nothing.
                    _give_up()

        thread = threading.Thread(target=run, name="activations", daemon=True)
        thread.start()
        ready.wait()
        return thread

    def _start_lifecycle(self, lifecycle: Lifecycle) -> None:
        complaint: str | None = None
        try:
            asyncio.run_coroutine_threadsafe(lifecycle.start(), self._loop).result()
        except SubagentError as exc:
            complaint = str(exc)
        except BaseException:
            self._end_loop()
            raise
        if complaint is not None:
            self._end_loop()
            refuse(f"This worker cannot start: {complaint}")

    def _shut_down(self, *, wait_for_foreign: bool) -> None:
        """Stop starting, release ours within the grace, let the others end, stop the loop.

        Runs in the main thread, possibly inside a signal handler, and possibly again while it is already running: a
        second signal means that the operator will not wait for other people's tasks.
        """
        if self._stopping:
            self._impatient = True
            return
        self._stopping = True
        self._accepting = False
        self._waiting.clear()  # not acknowledged: closing the channel puts them back on their queue
        lifecycle = self._lifecycle
        grace_seconds = self._grace_seconds
        deadline = time.monotonic() + grace_seconds
        if release := self._begin_release():
            self._run_until(release, deadline=deadline, what="release")
        if not self._wait(lambda: not self._activations, deadline=deadline):
            logger.error("%d activations did not end within %s s; cancelled", len(self._activations), grace_seconds)
            self._to_loop.put(self._cancel_drives)
            self._wait(lambda: not self._activations, deadline=time.monotonic() + CANCEL_GRACE_SECONDS)
        if not wait_for_foreign:
            for pid in tuple(self._foreign):
                self.terminate_job(pid)
        self._wait(lambda: self._impatient or not self._foreign, deadline=None if wait_for_foreign else deadline)
        if lifecycle is not None:
            stop = asyncio.run_coroutine_threadsafe(lifecycle.stop(), self._loop)
            self._run_until(stop, deadline=time.monotonic() + grace_seconds, what="stop")
        self._end_loop()

    def _cancel_drives(self) -> None:
        for drive in tuple(self._drives):
            drive.cancel()

    def _begin_release(self) -> concurrent.futures.Future[None] | None:
        if self._lifecycle is not None and self._release is None:
            self._release = asyncio.run_coroutine_threadsafe(self._lifecycle.release(), self._loop)
        return self._release

    def _run_until(self, future: concurrent.futures.Future[None], *, deadline: float, what: str) -> None:
        future.add_done_callback(lambda _: self._to_hub.put(_ignore))
        if not self._wait(future.done, deadline=deadline):
            future.cancel()
            logger.error("shutdown: %s did not end in time", what)
        elif (error := future.exception()) is not None:
            logger.error("shutdown: %s failed: %s", what, type(error).__name__)

    def _wait(self, done: Callable[[], bool], *, deadline: float | None) -> bool:
        """The hub no longer runs, so this serves the mailbox until `done`. False at the deadline (monotonic)."""
        waiter = select.poll()  # not select(): it fails in a process with more than 1024 open files
        waiter.register(self._wake_reader, select.POLLIN)
        self._to_hub.drain()
        while not done():
            # The second is for what sets no wake-up: a signal handler that ran in between.
            remaining = 1.0 if deadline is None else min(deadline - time.monotonic(), 1.0)
            if remaining <= 0:
                return False
            waiter.poll(remaining * 1000)
            self._on_wake()
        return True

    def _end_loop(self) -> None:
        self._watchdog.cancel()
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop_ended.set)
        self._loop_thread.join(LOOP_JOIN_SECONDS)
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._unwrap()
        if self._hub is not None:
            with contextlib.suppress(OSError, KeyError, ValueError):
                self._hub.remove(self._wake_reader)
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
        self._wake_reader.close()
        self._wake_writer.close()


@dataclass(eq=False, slots=True)
class _Job:
    """One message that Celery handed to the pool, and Celery's callbacks for it."""

    task: Any
    task_id: str
    request: Mapping[str, Any]
    activation: bool
    trace: Callable[[], Outcome]
    on_accept: Callable[..., object]
    on_end: Callable[..., object]
    on_timeout: Callable[..., object]
    soft_seconds: float | None
    hard_seconds: float | None
    pid: int
    started_at: float = 0.0
    coroutine: asyncio.Task[Any] | None = None
    stop: str | None = None

    def cancel(self) -> None:
        """On the loop's thread only."""
        if self.coroutine is not None:
            self.coroutine.cancel()


class _Abandoned(BaseException):
    """Leaves Celery's tracer without a result: the task was terminated, or ran into its hard limit."""


class _Mailbox:
    """Calls posted by any thread, made by one; a wake-up only when none is on its way."""

    def __init__(self, wake: Callable[[Callable[[], None]], None]) -> None:
        self._wake = wake
        self._calls: deque[Callable[[], object]] = deque()
        self._woken = False

    def put(self, call: Callable[[], object]) -> None:
        self._calls.append(call)
        if not self._woken:
            self._woken = True
            self._wake(self.drain)

    def drain(self) -> None:
        # Cleared before looking: a call posted from here on wakes again, so none is left lying.
        self._woken = False
        while self._calls:
            self._calls.popleft()()


def _spare_the_collector() -> None:
    """Let the garbage collector look seldom, and never at what was imported.

    A thousand children are a million objects that live until their children end. With the interpreter's thresholds the
    collector walks them again and again: a quarter of the worker's time in `make bench`.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _give_up() -> None:
    """End this process now: it can neither work nor stop. The sweepers of the others recover what it drove."""
    logger.critical("this worker cannot end by itself; it exits and leaves its runs to the sweepers")
    os._exit(70)


def _wrap_coroutine_tasks(app: Any, bridge: Callable[[object], object]) -> Callable[[], None]:
    """Pass what foreign tasks return through `bridge`. Returns the undo.

    Celery builds its tracers after the pool started, so they pick this up. With `autoretry_for` the innermost function
    is wrapped, so that a retry sees the exception of the coroutine.
    """
    before: list[tuple[Any, str, object]] = []
    for task in tuple(app.tasks.values()):
        if getattr(task, "is_activation", False):
            continue
        name = "_orig_run" if hasattr(task, "_orig_run") else "run"
        before.append((task, name, cast("dict[str, object]", vars(task)).get(name, _ignore)))
        setattr(task, name, _bridged(getattr(task, name), bridge))

    def undo() -> None:
        for task, name, value in before:
            if value is _ignore:
                delattr(task, name)
            else:
                setattr(task, name, value)

    return undo


def _bridged(function: Callable[..., object], bridge: Callable[[object], object]) -> Callable[..., object]:
    def run(*args: object, **kwargs: object) -> object:
        return bridge(function(*args, **kwargs))

    run.__wrapped__ = function  # pyright: ignore[reportFunctionMemberAccess]  # what `inspect.unwrap` follows
    return run


def _is_coroutine_function(function: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(function))


def _exception_info(exc: Exception) -> ExceptionInfo:
    """Celery's form of a failure. Called outside `except`, so that no other exception's text is chained to it."""
    try:
        raise exc
    except type(exc):
        return ExceptionInfo()


def _ignore(*_: object) -> None:
    pass
