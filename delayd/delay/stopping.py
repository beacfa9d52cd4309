"""Stopping: the last steps of a delay server that ends by itself.

sends refused, links closed ──▶ all is durable ──▶ a checkpoint covers all of it ──▶ done
                                (or flush)         (or it is begun)
"""

from collections.abc import Callable

from delayd.delay.parts import Logs, Threads, Upkeep
from delayd.machine.executor import Done


class Stopping:
    """A stop, from the request to stop to its end; for the loop alone. Before `begin` it does nothing."""

    def __init__(
        self,
        logs: Logs,
        upkeep: Upkeep,
        threads: Threads,
        begin_checkpoint: Callable[[], None],
    ) -> None:
        self._intake = logs.intake
        self._outcomes = logs.outcomes
        self._upkeep = upkeep
        self._checkpointer = upkeep.checkpointer
        self._threads = threads
        self._begin_checkpoint = begin_checkpoint
        self._stopped: Callable[[], None] | None = None

    @property
    def begun(self) -> bool:
        """Whether a stop is under way."""
        return self._stopped is not None

    def begin(self, stopped: Callable[[], None]) -> None:
        """Make everything durable, write a last checkpoint, and call back."""
        self._intake.close()
        self._outcomes.commit()
        self._stopped = stopped
        self.step()

    def step(self) -> None:
        """Go on with a stop: once everything is durable, write a last checkpoint; once that covers everything, end."""
        if self._stopped is None or self._upkeep.loading.running or self._checkpointer.running:
            return
        if not (self._intake.idle and self._outcomes.idle):
            self._outcomes.commit()
            self._outcomes.when_durable(self._step_soon)
            return
        if self._checkpointer.replay.offset < self._intake.durable.offset:
            self._upkeep.when_filed(self.step)
            self._begin_checkpoint()
            return
        self.end()

    def end(self) -> None:
        """End the stop: the last checkpoint is written, or can't be."""
        if self._stopped is not None:
            stopped, self._stopped = self._stopped, None
            stopped()

    def _step_soon(self) -> None:
        # The intake has no callback for this; a job on the thread reports back after all that came before it.
        thread = self._threads.worker if self._intake.looks_up else self._threads.commit
        thread.submit(_do_nothing, self._step_after)

    def _step_after(self, done: Done[None]) -> None:
        self.step()


def _do_nothing() -> None:
    """A job that only marks a place in the order of its thread."""
