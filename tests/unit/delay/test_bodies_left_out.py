"""Bodies that were handed over before their checkpoint: not filed again, never sent again, and counted all the same."""

from delayd.batch.batch import Batch
from delayd.batch.validate import check_batch
from delayd.hours import hour_of_ms
from delayd.log.hour import schedule_path
from delayd.log.segment import FILE_HEADER_BYTES
from delayd.testing.clock import START_MS
from tests.worlds.delay import FOLDER, World, wanted
from tests.worlds.files import read_schedule_log

HOUR = hour_of_ms(START_MS)
ROW_BYTES = 32  # Due, sequence, end of the body, its length, content hash.
BATCH_BYTES = 400  # Headers of file, group and batch, directory, and subject table.


def filed(world: World) -> list[Batch]:
    file = world.hours().get(HOUR)
    stored, damage = read_schedule_log(world.disk, FOLDER, world.core.site.identity.log_id, HOUR, file)
    assert damage is None, str(damage)
    for entry in stored:
        entry.batch.verify()
        check_batch(entry.batch)
    return [entry.batch for entry in stored]


def test_rows_of_a_minute_that_were_all_handed_over_cost_32_bytes_each_on_disk() -> None:
    world = World()
    rows = 2_000
    world.send(wanted(rows, 100, "m" * 200))
    world.pass_ms(1_000)
    world.checkpoint()
    size = world.disk.open(schedule_path(FOLDER, HOUR)).size()
    assert size == FILE_HEADER_BYTES + world.hours().get(HOUR).length
    assert size <= rows * ROW_BYTES + BATCH_BYTES
