"""gevent: clients work beside it, or say by name why they can't."""

import subprocess
import sys

import pytest

pytest.importorskip("gevent")

PROGRAM = '''
import faulthandler, sys, tempfile
faulthandler.dump_traceback_later(25, exit=True)
from datetime import timedelta
from gevent import monkey
import gevent

def all_of_it():
    """A home, a producer, a consumer and a worker."""
    with tempfile.TemporaryDirectory() as folder, delayd.open(folder) as home:
        with home.producer() as producer, home.consumer("a", "g") as consumer:
            producer.send("a", b"1", delay=timedelta(0))
            producer.send_nowait("a", b"2", delay=timedelta(0)).result(5)
            bodies = []
            while len(bodies) < 2:
                batch = consumer.pull()
                bodies += batch.bodies
                batch.ack()
        worker = home.worker(group="w")

        @worker.on("a")
        def handle(body):
            bodies.append(body)
            if len(bodies) == 4:
                worker.stop()

        worker.run()
        print("worked", sorted(bodies))

def refused(call):
    try:
        call()
        print("worked")
    except delayd.BadSetting as error:
        print("refused", "gevent" in error.message and "thread=False" in error.message)

def each_is_refused():
    worker = delayd.Worker("127.0.0.1:1", group="g")
    worker.on("a")(print)
    refused(lambda: delayd.Producer("127.0.0.1:1").send("a", b"", delay=timedelta(0)))
    refused(lambda: delayd.Consumer("127.0.0.1:1", "a", "g").pull())
    refused(lambda: delayd.open(tempfile.mkdtemp()))
    refused(worker.run)
'''

WAYS = {
    "patched before": ("monkey.patch_all(); import delayd; each_is_refused()", ["refused True"] * 4),
    "patched after": (
        "import delayd, delayd.client.engine; monkey.patch_all(); each_is_refused()",
        ["refused True"] * 4,
    ),
    "used, then patched": (
        "import delayd; all_of_it(); monkey.patch_all(); each_is_refused()",
        ["worked [b'1', b'1', b'2', b'2']", *["refused True"] * 4],
    ),
    "patched before, without threads": (
        "monkey.patch_all(thread=False); import delayd; gevent.spawn(all_of_it).get()",
        ["worked [b'1', b'1', b'2', b'2']"],
    ),
    "patched after, without threads": (
        "import delayd; monkey.patch_all(thread=False); gevent.spawn(all_of_it).get()",
        ["worked [b'1', b'1', b'2', b'2']"],
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_beside_gevent_clients_work_or_are_refused_by_name(way: str) -> None:
    order, expected = WAYS[way]
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM + order], capture_output=True, text=True, timeout=60, check=False
    )
    assert told.stdout.splitlines() == expected, told.stderr
