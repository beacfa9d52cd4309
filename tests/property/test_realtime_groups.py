"""Random lives of a realtime server with two groups, against a model of what each group has acknowledged.

A message that was acknowledged never comes again, also not after a crash; any other one comes until it is; a message
that one consumer holds under a lease is given to nobody else.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from delayd.testing.tree import PowerLoss
from delayd.wire.requests import RequestType
from tests.unit.realtime.batches import dispatch_batch
from tests.unit.realtime.world import Pulled, SimPeer, World

GROUPS = ("billing", "mail")
LEASE_MS = 30_000  # Of the pulls, and of those that survived a restart.
SETTINGS = {"lease_ms": LEASE_MS, "segment_bytes": 4096, "tail_bytes": 500, "retention_ms": 1_000}


class Lives(RuleBasedStateMachine):
    """One directory, over several lives."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(settings=SETTINGS)
        self.peer = SimPeer()
        self.session = 1
        self.world.hello(self.peer, 1)
        for group in GROUPS:
            # Retention waits for groups that exist, not for those that may come.
            assert self.world.pull(self.peer, group).bodies == []
        self.batch_id = 0
        self.sent: set[bytes] = set()
        self.acked: dict[str, set[bytes]] = {group: set() for group in GROUPS}
        self.held: dict[str, list[Pulled]] = {group: [] for group in GROUPS}

    @rule(rows=st.integers(1, 4))
    def dispatch(self, rows: int) -> None:
        self.batch_id += 1
        bodies = [f"{self.batch_id}-{row}".encode().ljust(400, b".") for row in range(rows)]
        w = (1, self.batch_id - 2) if self.batch_id > 2 else (0, 0)
        self.world.dispatch(self.peer, self.session, dispatch_batch(self.batch_id, bodies, w=w))
        self.sent.update(bodies)

    @rule(group=st.sampled_from(GROUPS), most=st.integers(1, 7))
    def pull(self, group: str, most: int) -> None:
        pulled = self.world.pull(self.peer, group, most=most)
        assert not self.acked[group] & set(pulled.bodies)
        assert not {body for other in self.held[group] for body in other.bodies} & set(pulled.bodies)
        assert len(pulled.bodies) == len(set(pulled.bodies)) <= most
        if pulled.bodies:
            self.held[group].append(pulled)

    @rule(group=st.sampled_from(GROUPS))
    def work(self, group: str) -> None:
        self.pull(group, 5)
        for pulled in self.held[group]:
            assert self.world.ack(self.peer, pulled.handles, group) == []
            self.acked[group].update(pulled.bodies)
        self.held[group].clear()

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from([name for name in GROUPS if self.held[name]]))
        pulled = self.held[group].pop(data.draw(st.integers(0, len(self.held[group]) - 1)))
        nack = data.draw(st.booleans())
        kind = RequestType.NACK if nack else RequestType.ACK
        assert self.world.ack(self.peer, pulled.handles, group, kind=kind) == []
        if not nack:
            self.acked[group].update(pulled.bodies)

    @rule()
    def let_leases_lapse(self) -> None:
        self.world.pass_time(LEASE_MS)
        self.held = {group: [] for group in GROUPS}

    @rule()
    def checkpoint(self) -> None:
        self.world.core.checkpoint()

    @rule()
    def retain(self) -> None:
        self.world.core.retain()

    @rule()
    def restart(self) -> None:
        self.world = self.world.restarted()
        self.go_on()

    @rule(way=st.sampled_from(PowerLoss), seed=st.integers(0, 100))
    def crash(self, way: PowerLoss, seed: int) -> None:
        disk = self.world.disk.after_crash(way, seed)
        state = self.world.state.after_crash(disk)
        self.world = World(disk, state, self.world.clock.reboot(), settings=SETTINGS)
        # What was pulled and not acknowledged may be offered at once, or after a whole lease: nothing is held for sure.
        self.held = {group: [] for group in GROUPS}
        self.go_on()

    def go_on(self) -> None:
        self.session += 1
        self.peer = SimPeer()
        self.world.hello(self.peer, self.session)

    @invariant()
    def serves(self) -> None:
        assert not self.world.failures

    def teardown(self) -> None:
        for group in GROUPS:
            self.world.pass_time(LEASE_MS)
            while (pulled := self.world.pull(self.peer, group)).bodies:
                assert not self.acked[group] & set(pulled.bodies)
                assert self.world.ack(self.peer, pulled.handles, group) == []
                self.acked[group].update(pulled.bodies)
            assert self.acked[group] == self.sent


Lives.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestLives = Lives.TestCase
