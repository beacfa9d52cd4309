"""What a checkpoint files: the batches of an hour, their columns, their limits, and tails that nobody counted."""

from operator import itemgetter
from random import Random

import pytest

from delayd.batch import KEPT, Batch, BatchKind, ColumnId, ProducerPart, parse
from delayd.content import differing_row
from delayd.delay.damage.mending import RETRY_MS
from delayd.delay.filing import log_range, schedule_writer
from delayd.delay.filing.hour_table import HourFile
from delayd.delay.filing.schedule_writer import BATCH_BYTES, BATCH_ROWS
from delayd.delay.quarantine import schedule_beside_path
from delayd.delay.timers.loader import load_hour
from delayd.hours import hour_name, hour_of_ms
from delayd.log.group import BYTES_MAX
from delayd.log.schedule import schedule_path
from delayd.log.segment import FILE_HEADER_BYTES
from delayd.tags import bloom_of
from delayd.testing.clock import START_MS
from delayd.testing.disk import CAPACITY_BYTES, Crash
from delayd.testing.tree import PowerLoss
from delayd.validate import check_batch
from tests.batches import bodies_of, messages, tags_of
from tests.worlds.delay import FOLDER, PRODUCER_ID, World, wanted
from tests.worlds.files import read_schedule_log

HOUR_MS = 3_600_000
FAR_MS = 2 * HOUR_MS  # Not loaded, so that nothing but the writer touches it.
FAR = hour_of_ms(START_MS + FAR_MS)


def filed(world: World, hour: int = FAR) -> list[Batch]:
    """The batches of an hour's schedule log as the checkpoint counts them."""
    stored, damage = read_schedule_log(world.disk, FOLDER, world.core.identity.log_id, hour, world.hours().get(hour))
    assert damage is None, str(damage)
    for entry in stored:
        assert entry.batch.kind is BatchKind.SCHEDULE and entry.batch.schedule.hour == hour
        entry.batch.verify()
        check_batch(entry.batch)
    return [entry.batch for entry in stored]


def rows_of(batch: Batch) -> list[tuple[int, bytes, bytes]]:
    """Due instant, headers and body of each row."""
    headers = [b""] * batch.count
    if ColumnId.HEADERS_END in batch:
        headers = [bytes(batch.heap[start:end]) for start, end in zip(*batch.region(ColumnId.HEADERS_END), strict=True)]
    return list(zip(batch.int64s(ColumnId.DELIVER_AT_MS).tolist(), headers, bodies_of(batch), strict=True))


def test_an_hour_is_one_group_of_batches_whose_rows_rise_by_due_instant_and_sequence() -> None:
    world = World()
    late, soon = wanted(3, FAR_MS + 9_000, "late"), wanted(3, FAR_MS + 10, "soon")
    world.send([late[0], soon[0], late[1]])
    world.settle()
    world.send([soon[1], late[2], soon[2]])
    world.settle()
    world.checkpoint()
    (batch,) = filed(world)
    assert batch.uint64s(ColumnId.SEQUENCE).tolist() == [2, 4, 6, 1, 3, 5]
    assert bodies_of(batch) == [b"soon-0", b"soon-1", b"soon-2", b"late-0", b"late-1", b"late-2"]
    assert ColumnId.SUBJECT not in batch and ColumnId.ACCEPTED_AT_MS not in batch and ColumnId.HEADERS_END not in batch


def test_rows_of_several_subjects_and_hours_go_to_their_hours_with_their_subjects() -> None:
    world = World()
    rows = [
        row
        for index in range(6)
        for row in wanted(1, FAR_MS + index % 3 * HOUR_MS, f"m{index}", (b"orders.eu", b"mail")[index % 2])
    ]
    world.send(rows)
    world.settle()
    world.checkpoint()
    for offset in range(3):
        (batch,) = filed(world, FAR + offset)
        assert batch.uint64s(ColumnId.SEQUENCE).tolist() == [1 + offset, 4 + offset]
        names = [batch.subjects()[number] for number in batch.uint32s(ColumnId.SUBJECT).tolist()]
        assert names == [rows[offset][1], rows[offset + 3][1]]
        assert bodies_of(batch) == [rows[offset][2], rows[offset + 3][2]]


@pytest.mark.parametrize("rows", [3, 100])
def test_keys_and_tags_are_filed_with_their_rows(rows: int) -> None:
    world = World()
    bodies, keys = [b"b%d" % row for row in range(rows)], [b"key" * (row % 4) for row in range(rows)]
    flags, tags = [min(row % 4, 2) for row in range(rows)], [["a", f"t{row % 3}"][row % 3 :] for row in range(rows)]
    due = [START_MS + FAR_MS + row for row in reversed(range(rows))]
    plain = messages([b"last"], due=[due[0] + 1], part=ProducerPart(PRODUCER_ID, 1, 0))
    keyed = messages(bodies, due=due, keys=keys, flags=flags, tags=tags, part=ProducerPart(PRODUCER_ID, 2, 0))
    # In another hour nobody has a key or tags.
    later = messages([b"bare"], due=[due[0] + HOUR_MS], part=ProducerPart(PRODUCER_ID, 3, 0))
    for data in (plain, keyed, later):
        world.core.send(parse(data), lambda what, duplicate: None)
    world.settle()
    world.checkpoint()
    (batch,) = filed(world)
    check_batch(batch)
    found = [bytes(batch.heap[start:end]) for start, end in zip(*batch.region(ColumnId.KEY_END), strict=True)]
    assert found == [*reversed(keys), b""]
    assert batch.column(ColumnId.ROW_FLAGS).tolist() == [*reversed(flags), 0]
    assert tags_of(batch) == [*map(tuple, reversed(tags)), ()]
    assert batch.uint64s(ColumnId.TAG_BLOOM).tolist() == [*map(bloom_of, reversed(tags)), 0]
    assert bodies_of(batch) == [*reversed(bodies), b"last"]
    assert differing_row(batch) is None
    (bare,) = filed(world, FAR + 1)
    assert bare.layout.regions == (ColumnId.BODY_END,) and bare.layout.columns.isdisjoint(KEPT)


def test_headers_are_kept_for_the_rows_that_have_them() -> None:
    world = World()
    due = [START_MS + FAR_MS] * 2
    plain = messages([b"p", b"q"], due=due, part=ProducerPart(PRODUCER_ID, 1, 0))
    with_headers = messages([b"r", b"s"], due=due, headers=[b"\x80", b""], part=ProducerPart(PRODUCER_ID, 2, 0))
    for data in (plain, with_headers):
        world.core.send(parse(data), lambda what, duplicate: None)
    world.settle()
    world.checkpoint()
    (batch,) = filed(world)
    starts, ends = batch.region(ColumnId.HEADERS_END)
    assert [bytes(batch.heap[start:end]) for start, end in zip(starts, ends, strict=True)] == [b"", b"", b"\x80", b""]
    assert bodies_of(batch) == [b"p", b"q", b"r", b"s"]


def test_the_instant_of_acceptance_is_kept_only_where_a_row_was_due_already() -> None:
    world = World()
    world.send([*wanted(1, -5_000, "past"), *wanted(1, FAR_MS, "future")])
    world.settle()
    world.checkpoint()
    (past,) = filed(world, hour_of_ms(START_MS))
    assert past.int64s(ColumnId.ACCEPTED_AT_MS).tolist() == [START_MS]
    assert past.int64s(ColumnId.DELIVER_AT_MS).tolist() == [START_MS - 5_000]
    assert ColumnId.ACCEPTED_AT_MS not in filed(world)[0]


def test_a_batch_ends_at_its_limit_of_rows() -> None:
    world = World(segment_bytes=1 << 20)
    world.send(wanted(BATCH_ROWS + 5, FAR_MS, "m"))
    world.settle()
    world.checkpoint()
    assert [batch.count for batch in filed(world)] == [BATCH_ROWS, 5]


def test_a_batch_ends_at_its_limit_of_bytes_and_a_large_message_gets_one_of_its_own() -> None:
    world = World(segment_bytes=64 << 20)
    sizes = [400_000, 400_000, 400_000, 2_000_000, 10, 10]
    bodies = [bytes([index]) * size for index, size in enumerate(sizes)]
    data = messages(bodies, due=[START_MS + FAR_MS] * len(sizes), part=ProducerPart(PRODUCER_ID, 1, 0))
    world.core.send(parse(data), lambda what, duplicate: None)
    world.settle()
    world.checkpoint()
    batches = filed(world)
    assert [batch.count for batch in batches] == [2, 1, 1, 2]
    assert all(batch.total_bytes <= BATCH_BYTES + 1_024 or batch.count == 1 for batch in batches)
    assert [body for batch in batches for body in bodies_of(batch)] == bodies


def test_an_hour_of_more_bytes_than_a_group_can_hold_is_filed_in_several_groups() -> None:
    world = World(segment_bytes=64 << 20, tail_bytes=1 << 20)
    for number in range(1, 8):
        bodies = [bytes([number]) * 3_000_000] * 5
        data = messages(bodies, due=[START_MS + FAR_MS] * 5, part=ProducerPart(PRODUCER_ID, number, 0))
        world.core.send(parse(data), lambda what, duplicate: None)
        world.settle()
    world.checkpoint()
    batches = filed(world)
    assert sum(batch.total_bytes for batch in batches) > BYTES_MAX
    assert [body[:1] for batch in batches for body in bodies_of(batch)] == [
        bytes([1 + index // 5]) for index in range(35)
    ]


def test_a_range_that_is_read_in_many_windows_and_written_in_many_parts_is_filed_whole_and_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_range, "WINDOW_BYTES", 600)
    monkeypatch.setattr(log_range, "PIECE_WORDS", 3)
    monkeypatch.setattr(log_range, "PIECE_BYTES", 200)
    monkeypatch.setattr(schedule_writer, "PART_BYTES", 300)
    world = World()
    draw = Random(5)
    expected: dict[int, list[tuple[int, bytes, bytes]]] = {}
    for number in range(1, 30):
        count = draw.randint(1, 5)
        due = [START_MS + FAR_MS + draw.choice((0, 1, 2, 40)) * HOUR_MS + draw.randint(0, 999) for _ in range(count)]
        bodies = [draw.randbytes(draw.choice((0, 1, 8, 90))) for _ in range(count)]
        headers = [draw.choice((b"", b"\x80", b"\x81\xa1a\xa1b")) for _ in range(count)] if number % 3 == 0 else None
        part = ProducerPart(PRODUCER_ID, number, 0)
        data = (
            messages(bodies, due=due, headers=headers, part=part) if headers else messages(bodies, due=due, part=part)
        )
        world.core.send(parse(data), lambda what, duplicate: None)
        world.settle()
        for instant, header, body in zip(due, headers or [b""] * count, bodies, strict=True):
            expected.setdefault(hour_of_ms(instant), []).append((instant, header, body))
    world.checkpoint()
    for hour, rows in expected.items():
        assert [row for batch in filed(world, hour) for row in rows_of(batch)] == sorted(rows, key=itemgetter(0))
    world.check_logs()


def test_a_checkpoint_of_many_small_batches_gives_way_after_a_number_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def pieces(batches: int) -> int:
        """Of a checkpoint of so many batches, all of one hour."""
        monkeypatch.setattr(log_range, "WINDOW_BATCHES", batches)
        world, counted = World(), [0]
        for number in range(40):
            world.send(wanted(1, FAR_MS, f"m{number}"))
            world.settle()
        *_, worker = world.executors()

        def give_way() -> None:
            counted[0] += 1

        monkeypatch.setattr(worker, "give_way", give_way)
        world.checkpoint()
        assert sum(batch.count for batch in filed(world)) == 40
        return counted[0]

    assert pieces(4) >= pieces(1_000) + 9, "a stop does not wait for all of them, and urgent jobs do not"


def test_folders_of_new_days_are_made_durable_by_the_sync_of_their_files_and_not_one_by_one() -> None:
    world = World()
    world.send([row for day in range(1, 6) for row in wanted(1, day * 24 * HOUR_MS, f"m{day}")])
    world.settle()
    begin = len(world.disk.operations)
    world.checkpoint()
    done = world.disk.operations[begin:]
    assert sum(each.startswith(f"make_folder {FOLDER}/schedule/") for each in done) == 5
    assert not [each for each in done if each.startswith("sync_folder") and "schedule" in each]


def test_the_source_range_is_that_of_the_checkpoint_and_the_next_one_goes_on_behind_it() -> None:
    world = World()
    world.send(wanted(2, FAR_MS, "a"))
    world.settle()
    first = world.checkpoint()
    world.send(wanted(2, FAR_MS, "b"))
    world.settle()
    second = world.checkpoint()
    assert [batch.schedule[:2] for batch in filed(world)] == [(0, first), (first, second)]
    world.check_logs()
    assert world.scheduled() == dict.fromkeys(range(1, 5), FAR)


def test_rule_P4_a_tail_that_no_checkpoint_counts_is_cut_when_the_hour_is_next_written() -> None:
    world = World()
    world.send(wanted(2, FAR_MS, "a"))
    world.settle()
    world.checkpoint()
    world.send(wanted(3, FAR_MS, "b"))
    world.settle()
    length = world.hours().get(FAR).length
    world.disk.faults.crash_on = "commit"
    with pytest.raises(Crash):
        world.checkpoint()
    world = world.after_crash(PowerLoss.ALL_KEPT)
    path = schedule_path(FOLDER, FAR)
    assert world.disk.open(path).size() > FILE_HEADER_BYTES + length
    assert len(filed(world)) == 1
    world.send(wanted(1, FAR_MS, "c"))
    world.settle()
    world.checkpoint()
    assert world.disk.open(path).size() == FILE_HEADER_BYTES + world.hours().get(FAR).length
    assert [bodies_of(batch) for batch in filed(world)] == [
        [b"a-0", b"a-1"],
        [b"b-0", b"b-1", b"b-2", b"c-0"],
    ]


def test_a_file_that_no_checkpoint_knows_is_made_anew() -> None:
    world = World()
    world.send(wanted(2, FAR_MS, "a"))
    world.settle()
    world.disk.faults.crash_on = "commit"
    with pytest.raises(Crash):
        world.checkpoint()
    world = world.after_crash(PowerLoss.ALL_KEPT)
    assert world.disk.exists(schedule_path(FOLDER, FAR)) and not world.hours()
    world.checkpoint()
    assert world.scheduled() == {1: FAR, 2: FAR}


def test_rule_L10_what_belongs_into_a_file_that_was_cut_short_is_kept_beside_it_until_its_copy_is_there() -> None:
    world = World()
    world.send(wanted(2, FAR_MS, "a"))
    world.settle()
    world.checkpoint()
    path = schedule_path(FOLDER, FAR)
    file = world.disk.open(path, write=True)
    whole = file.pread(file.size(), 0)
    file.truncate(len(whole) - 8)
    log_id = world.core.identity.log_id
    loaded = load_hour(world.disk, FOLDER, log_id, FAR, world.hours().get(FAR))
    assert loaded.damage is not None and "cut short" in loaded.damage.what
    world.send(wanted(1, FAR_MS, "b"))
    world.settle()
    answers: list[int] = []
    world.core.checkpoint(answers.append)
    world.pass_ms(3_000)
    assert answers and world.core.counters()["pending_rows"] == 0, "a checkpoint passes one damaged file"
    (entry,) = world.core.quarantine.listing()
    assert (entry.id, entry.path, entry.rows) == (f"schedule/{hour_name(FAR)}", path, 2)
    assert file.size() == len(whole) - 8, "nothing is written to the damaged file"
    file.pwritev([whole[-8:]], len(whole) - 8)
    world.pass_ms(RETRY_MS + 1_000)
    assert not world.core.quarantine.listing() and world.scheduled() == {1: FAR, 2: FAR, 3: FAR}
    assert not world.disk.exists(schedule_beside_path(FOLDER, FAR))
    world.drain(2 * FAR_MS)
    world.check_books()
    world.check_sealing()


def test_an_hour_whose_file_or_header_is_damaged_or_gone_is_reported_and_not_raised() -> None:
    world = World()
    world.send(wanted(2, FAR_MS, "a"))
    world.settle()
    world.checkpoint()
    path, log_id, file = schedule_path(FOLDER, FAR), world.core.identity.log_id, world.hours().get(FAR)

    def damage(known: HourFile = file) -> str:
        found = load_hour(world.disk, FOLDER, log_id, FAR, known)
        assert found.damage is not None and not len(found.prepared.rows)
        return found.damage.what

    assert "other groups" in damage(file._replace(last_crc32c=1))
    world.disk.open(path, write=True).pwritev([b"x"], 20)
    assert "checksum of the file header" in damage()
    world.disk.open(path, write=True).truncate(30)
    assert "cut short" in damage()
    world.disk.remove(path)
    assert "gone" in damage()


def test_rule_L8_a_full_disk_puts_the_checkpoint_off_and_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    opened, closed = [], []
    world.send([row for hour in range(5) for row in wanted(1, FAR_MS + hour * HOUR_MS, f"m{hour}")])
    world.settle()
    world.disk.capacity_bytes = world.disk.used_bytes + 700
    offsets: list[int] = []
    open_file = world.disk.open

    def counting(path: str, *, write: bool = False, create: bool = False) -> object:
        file = open_file(path, write=write, create=create)
        opened.append(path)
        close = file.close

        def closing() -> None:
            closed.append(path)
            close()

        monkeypatch.setattr(file, "close", closing)
        return file

    monkeypatch.setattr(world.disk, "open", counting)
    world.core.checkpoint(offsets.append)
    world.settle()
    world.pass_ms(3_000)
    assert not offsets and not world.hours() and len(opened) >= 5
    assert sorted(opened) == sorted(closed)
    world.disk.capacity_bytes = CAPACITY_BYTES
    world.pass_ms(2_000)
    assert len(offsets) == 1
    assert world.scheduled() == {1 + hour: FAR + hour for hour in range(5)}
