"""Site: where a part of a server works: its directory, its clock, and a thread for what takes long."""

from dataclasses import dataclass

from delayd.clock import Clock
from delayd.disk import Disk
from delayd.executor import Executor
from delayd.identity import Identity
from delayd.state import State


@dataclass(frozen=True, slots=True)
class Site:
    """One data directory, in one life of its server. ``worker`` keeps the order of its own jobs."""

    disk: Disk
    state: State
    folder: str
    identity: Identity
    clock: Clock
    worker: Executor

    @property
    def log_id(self) -> int:
        """The number that names the directory for ever."""
        return self.identity.log_id

    @property
    def epoch(self) -> int:
        """The number of this life of the directory's server."""
        return self.identity.epoch
