"""Lost values: values of the state about a subject's target or a producer that do not check any more (rule L9).

An operator gives such a value up. Then it is replaced or removed, durably: otherwise the next start would wait for a
decision again.
"""

from collections.abc import Callable
from functools import partial

from delayd.delay.handoff.dispatcher import Dispatcher
from delayd.delay.producers import Producers
from delayd.delay.quarantine import Decided, Entry, Kind, Quarantine
from delayd.delay.state_values import TARGET_PREFIX
from delayd.errors import DamagedValue, DiskFull
from delayd.machine.executor import Done
from delayd.machine.identity import Site


class LostValues:
    """Carries out operators' decisions about lost values; for the loop alone."""

    def __init__(self, site: Site, quarantine: Quarantine, dispatcher: Dispatcher, producers: Producers) -> None:
        self._site = site
        self._quarantine = quarantine
        self._dispatcher = dispatcher
        self._producers = producers

    def found(self, producers: dict[int, DamagedValue], targets: dict[bytes, DamagedValue]) -> None:
        """Quarantine the lost values that a start found."""
        for producer_id, error in producers.items():
            self._quarantine.put(Kind.PRODUCER, f"{producer_id:016x}", error)
        for subject, error in targets.items():
            name = subject.decode("ascii")
            self._quarantine.put(Kind.TARGET, name, error, subject=name)

    def release_target(self, entry: Entry, drop: bool, done: Decided) -> None:
        """Let a subject go to the target that meta names."""
        subject = entry.name.encode("ascii")
        ask = partial(self._dispatcher.ask_meta, subject)
        self._give_up(entry, (TARGET_PREFIX + subject, None), ask, f"meta is asked where {entry.name} goes", done)

    def release_producer(self, entry: Entry, drop: bool, done: Decided) -> None:
        """Take a producer's batches again."""
        producer_id = int(entry.name, 16)
        pair, go_on = self._producers.kept_of(producer_id), partial(self._producers.find_again, producer_id)
        self._give_up(entry, pair, go_on, "its batches are taken again", done)

    def _give_up(
        self, entry: Entry, pair: tuple[bytes, bytes | None], go_on: Callable[[], None], told: str, done: Decided
    ) -> None:
        if self._quarantine.find(entry.id) is None:
            done(True, "it was released already")
            return

        def stored(ended: Done[None]) -> None:
            try:
                ended.result()
            except DiskFull as error:
                done(False, f"nothing was stored: {error.message}")
                return
            if self._quarantine.lift(entry.kind, entry.name):
                go_on()
            done(True, told)

        key, value = pair
        puts, removes = ([], [key]) if value is None else ([(key, value)], [])
        self._site.worker.submit(partial(self._site.state.commit, puts, removes), stored)
