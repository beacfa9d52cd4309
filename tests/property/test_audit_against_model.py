"""The audit of books with any mix of faults says what a model on dicts says."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from delayd.outcome import Outcome
from delayd.reading.audit import LATE_MS_LIMIT, LOST_GRACE_MS
from delayd.reading.books import audit_directory
from delayd.testing.disk import MemoryDisk
from tests.books import HOUR_MS, START_MS, Books

NOW_MS = START_MS + HOUR_MS + 30_000

# What happens to a message, in any combination and order: each item is (act, milliseconds).
ACTS = st.tuples(
    st.sampled_from(["hand over", "store", "record only", "wrong offset", "dead", "checkpoint"]),
    st.sampled_from([-1, 0, 5, LATE_MS_LIMIT, LATE_MS_LIMIT + 1]),
)
MESSAGES = st.tuples(
    st.sampled_from([-HOUR_MS, 0, 7, HOUR_MS, HOUR_MS + 25_000, 3 * HOUR_MS]), st.lists(ACTS, max_size=3)
)


@dataclass
class Model:
    """What is known of one message: (claimed, appended, decided) where stored, (outcome, claimed, truth) where told."""

    due: int
    filed: int
    stored: list[tuple[int, int, int]] = field(default_factory=list)
    told: list[tuple[Outcome, int, bool]] = field(default_factory=list)

    def findings(self, watermark: int) -> set[str]:
        outcome = self.told[0][0] if self.told else None
        found = set()
        if not self.told and not self.stored and self.filed + LOST_GRACE_MS < NOW_MS:
            found.add("LOST")
        if outcome == Outcome.DISPATCHED and not self.stored:
            found.add("LOST")
        if len(self.told) > 1 or len(self.stored) > 1:
            found.add("DUPLICATE")
        claims = [claimed for claimed, _, _ in self.stored]
        claims += [claimed for told, claimed, _ in self.told if told == Outcome.DISPATCHED]
        if claims and min(claims) < self.due:
            found.add("EARLY")
        if self.stored and not self.told and self.stored[0][2] <= watermark:
            found.add("ORPHAN")
        if len(self.stored) == len(self.told) == 1 and not self.told[0][2]:
            found.add("MISMATCH")
        if outcome == Outcome.DISPATCHED and self.stored:
            last = max(self.stored[0][1], self.told[0][1])
            found |= {"LATE"} if last - self.filed > LATE_MS_LIMIT else set()
        return found


@given(st.lists(MESSAGES, max_size=12))
def test_the_audit_agrees_with_a_model(messages: list[tuple[int, list[tuple[str, int]]]]) -> None:
    books = Books("/data", MemoryDisk())
    model: dict[int, Model] = {}
    for after_ms, acts in messages:
        (sequence,) = books.send([START_MS + after_ms], at_ms=START_MS - 1000)
        row = books.rows[sequence]
        known = model[sequence] = Model(row.deliver_at_ms, max(row.deliver_at_ms, row.appended_at_ms))
        for act, ms in acts:
            claimed = known.filed + ms
            if act == "checkpoint":
                books.checkpoint()
            elif act == "dead":
                books.decide([sequence], Outcome.DEAD)
                known.told.append((Outcome.DEAD, 0, False))
            elif act == "record only":
                books.record([(row.hour, books.part([sequence], claimed, 8))])
                known.told.append((Outcome.DISPATCHED, claimed, False))
            else:
                ((hour, part),) = books.hand_over([sequence], claimed_ms=claimed, delay_ms=3, record=False)
                known.stored.append((claimed, claimed + 3, books.batch_id))
                if act != "store":
                    offset = part.target_offset + (8 if act == "wrong offset" else 0)
                    books.record([(hour, part._replace(target_offset=offset))])
                    known.told.append((Outcome.DISPATCHED, claimed, act == "hand over"))
    books.see_all(NOW_MS)
    report = audit_directory("/data", now_ms=NOW_MS, disk=books.disk)
    expected = {sequence: known.findings(books.batch_id - 1) for sequence, known in model.items()}
    found: dict[int, set[str]] = {sequence: set() for sequence in model}
    for finding in report.findings:
        found[finding.sequence].add(finding.kind.name)
    assert found == expected
    counted = Counter(kind for kinds in expected.values() for kind in kinds)
    total = report.total
    figures = {"LOST": total.lost, "DUPLICATE": total.duplicate, "EARLY": total.early, "ORPHAN": total.orphan}
    figures |= {"MISMATCH": total.mismatch, "LATE": total.late}
    assert figures == {kind: counted[kind] for kind in figures}
    assert report.balanced == (not set(counted) - {"LATE"}) and total.scheduled == len(model)
