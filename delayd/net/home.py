"""Home: everything that a server with logs holds while it runs: its directory's lock, state, clock and threads, and its
jobs.

Everything is opened in one order and closed in the reverse one; the lock is the first and the last. Jobs go on even if
somebody sets the wall clock (rule T3).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Protocol

from apscheduler.executors.debug import DebugExecutor
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from delayd.address import Endpoint
from delayd.config import DelayConfig, RealtimeConfig
from delayd.errors import DamagedData, DataError
from delayd.log.checkpoint import Payload, gaps_of, read_checkpoint
from delayd.machine.clock import ClockEvidence
from delayd.machine.disk import Disk
from delayd.machine.executor import Done, Priority
from delayd.machine.identity import LOCK, Identity, holder_name, known_cluster_id, known_identity
from delayd.net.cut import remove_left
from delayd.net.held_start import HeldServer
from delayd.net.machine import Machine, OwnExecutor, check_not_metas, check_role
from delayd.net.timer import Ticks

STATE = "state.lmdb"
LOOK_STATE_S = 30.0  # How often the state's file is checked for, as the files of the logs are.
LOOK_S = 1.0  # How often the plan of the jobs is compared with the wall clock.
# For what a core does at its stop, such as a last checkpoint. A stop as a whole has 5 s: its connections have 2 s of
# them, and a second is left for the piece of work that each thread is in.
CORE_STOP_MS = 1_500


log = logging.getLogger(__name__)


class HomeCore(Protocol):
    """The server's core, which is stopped before its home is closed."""

    def stop(self, stopped: Callable[[], None]) -> None:
        """Finish the work under way, make it durable, then call back; nobody waits for longer than CORE_STOP_MS."""

    def close(self) -> None:
        """Put removed files back in their places, and close all; the threads have ended."""


class Home:
    """One server's directory; made inside its running loop.

    Raises:
        DirectoryInUse, NotWritable, NewerFormat, DamagedData: why it can't be opened.
    """

    def __init__(
        self,
        config: DelayConfig | RealtimeConfig,
        machine: Machine,
        threads: Sequence[str],
        after_job: Callable[[], None],
    ) -> None:
        self.disk = machine.disk()
        self.disk.make_folder(config.folder)
        self._lock = self.disk.lock(
            f"{config.folder}/{LOCK}", holder_name(config.role, supervised=config.exit_with_stdin)
        )
        self.state_path = f"{config.folder}/{STATE}"
        self.executors: list[OwnExecutor] = []
        self._loop = asyncio.get_running_loop()
        self._after_job = after_job
        self._closed = False
        with ExitStack() as undo:  # This process may start again, once the cause of a failure was mended.
            undo.callback(self.disk.close)
            undo.callback(self._lock.release)
            check_role(self.disk, config.folder, config.role)
            self.state = machine.state(self.state_path)
            undo.callback(self.state.close)
            check_not_metas(self.state, config.folder, config.role)
            remove_left(self.disk, config.folder)
            self.clock = machine.clock(_evidence(_last_checkpoint(self.disk, config.folder)))
            undo.callback(self._end_threads)
            for name in threads:
                self.executors.append(machine.executor(f"{config.role}-{name}", self._called))
            undo.pop_all()
        self._intervals: dict[str, timedelta] = {}
        self._looks: Ticks | None = None
        self._stopping = False
        # The scheduler calls a run at once, as a plain function. By default it would make a task of it; the end of the
        # scheduler would cancel a task that has not begun, and log this as an error.
        self._scheduler = AsyncIOScheduler(
            executors={"default": DebugExecutor()}, job_defaults={"misfire_grace_time": None}, timezone="UTC"
        )

    def every(self, seconds: float, job: Callable[[], None]) -> None:
        """Run a job again and again on the loop; it only posts a request to a core, and its error ends the server."""
        name = f"job-{len(self._intervals)}"
        self._intervals[name] = timedelta(seconds=seconds)

        def run() -> None:
            # The scheduler forgets a job after its one run, and it would log the job's error and go on. So the job is
            # called after the scheduler's turn, and only then its next run is planned.
            self._loop.call_soon(again)

        def again() -> None:
            if not self._stopping:
                self._plan(name, run)
                job()

        self._plan(name, run)
        if not self._scheduler.running:
            self._scheduler.start()
            self._looks = Ticks(self._loop, LOOK_S, self._look)
            self.every(LOOK_STATE_S, self._look_at_state)

    def _look_at_state(self) -> None:
        self.executors[-1].submit(self.state.look, _looked, Priority.SPARE)

    async def stop(self, core: HomeCore) -> None:
        """End the jobs and the core; what the core has not done after CORE_STOP_MS is given up. All that it has told
        anybody is durable, and the next start replays what its last checkpoint was to hold.
        """
        self._stopping = True  # No job is called from here on: the core and the threads would be closed under it.
        if self._looks is not None:
            self._looks.close()
            self._scheduler.shutdown(wait=False)
        stopped = asyncio.Event()
        core.stop(stopped.set)
        try:
            async with asyncio.timeout(CORE_STOP_MS / 1000):
                await stopped.wait()
        except TimeoutError:
            log.info("last_checkpoint_given_up limit_ms=%d", CORE_STOP_MS)

    def close(self, core: HomeCore | None) -> None:
        """End the threads, close the core's files if there is one, and free the directory for another server."""
        self._end_threads()
        if core is not None:
            core.close()
        self.state.close()
        self._lock.release()
        self.disk.close()

    def _end_threads(self) -> None:
        # What the threads have done is durable, and the next start reads it: nobody is left to hear of it here.
        self._closed = True
        for executor in self.executors:
            executor.close()

    def _plan(self, name: str, run: Callable[[], None]) -> None:
        # One run is planned, not an interval: for an interval the scheduler would list all runs that were skipped when
        # the wall clock was set ahead, which takes minutes after a step of years.
        run_date = datetime.now(UTC) + self._intervals[name]
        self._scheduler.add_job(run, "date", run_date=run_date, id=name, replace_existing=True)

    def _look(self) -> None:
        """Run a job at once if its next run is further off than its interval: then the wall clock was set back."""
        now = datetime.now(UTC)
        for name, interval in self._intervals.items():
            job = self._scheduler.get_job(name)
            if job is not None and job.next_run_time > now + interval:
                job.modify(next_run_time=now)

    def _called(self, done: Callable[[], object]) -> None:
        """Call what an executor has to tell."""
        if not self._closed:
            done()
            self._after_job()


def abandon(config: DelayConfig | RealtimeConfig, listens: Endpoint, machine: Machine, home: Home | None) -> HeldServer:
    """Leave the directory after a start that failed; return what is known of its server."""
    found = Identity(0, 0), 0
    if home is not None:
        try:
            found = known_identity(home.state, home.state_path), known_cluster_id(home.state, home.state_path)
        except DataError as error:
            log.warning("identity_unknown reason=%r", str(error))
        home.close(None)
    return HeldServer(config.role, listens, machine.secret(config), *found[0], found[1])


def _looked(done: Done[None]) -> None:
    done.result()


def _last_checkpoint(disk: Disk, folder: str) -> Payload | None:
    try:
        return read_checkpoint(disk, folder)
    except DamagedData as error:
        # The file is made anew; until then the clock is judged as in another boot (rule T1).
        log.warning("checkpoint_file_rebuilt reason=%r", str(error))
        return None


def _evidence(checkpoint: Payload | None) -> ClockEvidence | None:
    """The reading of the clock that the last life left; None if there was no earlier life."""
    if checkpoint is None:
        return None
    evidence = checkpoint["clock"]
    assert isinstance(evidence, list), "a checkpoint names its clock's reading"
    boot_id, boottime_ms, wall_ms = evidence
    latest_ms = checkpoint.get("latest_ms")
    latest = latest_ms if isinstance(latest_ms, int) else 0  # A realtime server keeps none.
    return ClockEvidence(str(boot_id), int(str(boottime_ms)), int(str(wall_ms)), latest, gaps_of(checkpoint))
