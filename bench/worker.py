"""How many messages one process of a worker handles: handlers that only count, eight slots, all messages due already.

The clock runs from the first call of the handler until the last acknowledgement. That of delayd is durable at the
server; those of dramatiq and Celery are in Redis, which calls fsync once a second. Each side is its library's own
worker in one process (``python -m bench.worker SIDE ADDRESS MESSAGES``); broker and servers are other processes.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import delayd
from bench.figures import Figures
from bench.redis_peer import RedisMissing, redis_server
from bench.servers import servers

SUBJECT, GROUP = "bench.work", "workers"
SLOTS = 8
BODY = b"x" * 200
BATCH = 500
LIMIT_S = 100
DUE_S = 1.0  # Until all messages are in the realtime log.


class Count:
    """Counts calls, from several threads; ``end`` is called by the last one."""

    def __init__(self, messages: int, end: Callable[[], object]) -> None:
        self._left = messages
        self._end = end
        self._lock = threading.Lock()
        self.began = 0.0

    def call(self) -> None:
        """A message is handled."""
        with self._lock:
            self.began = self.began or time.perf_counter()
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._end()


def functions(messages: int) -> Figures:
    """Handlers of delayd that are functions."""
    return _delayd("functions", messages)


def coroutines(messages: int) -> Figures:
    """Handlers of delayd that are coroutines."""
    return _delayd("coroutines", messages)


def dramatiq(messages: int) -> Figures:
    """The same in dramatiq."""
    _need("dramatiq")
    with redis_server() as server:
        url = f"redis://127.0.0.1:{server.port}"
        actor = _dramatiq_actor(url, lambda: None)[1]
        for _ in range(messages):
            actor.send(BODY.decode())
        return _child("dramatiq", url, messages)


def celery(messages: int) -> Figures:
    """The same in Celery."""
    _need("celery")
    with redis_server() as server:
        url = f"redis://127.0.0.1:{server.port}"
        task = _celery_task(url, lambda: None)[1]
        for _ in range(messages):
            task.delay(BODY.decode())
        return _child("celery", url, messages)


def _delayd(kind: str, messages: int) -> Figures:
    with servers("realtime", "delay") as running:
        with delayd.Producer(running.meta) as producer:
            for _ in range(0, messages, BATCH):
                producer.send_batch(SUBJECT, [BODY] * BATCH, delay=timedelta(0))
        time.sleep(DUE_S)
        return _child(kind, running.meta, messages)


def _child(side: str, address: str, messages: int) -> Figures:
    command = [sys.executable, "-m", "bench.worker", side, address, str(messages)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=LIMIT_S)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def _tell(count: Count, messages: int) -> None:
    took_s = time.perf_counter() - count.began
    cpu_us = time.process_time() / messages * 1e6  # With the start of the process, which is a tenth or less.
    print(json.dumps({"messages_s": round(messages / took_s, 1), "worker_cpu_us": round(cpu_us, 1)}), flush=True)


def _work_delayd(kind: str, address: str, messages: int) -> None:
    worker = delayd.Worker(address)
    count = Count(messages, worker.stop)

    def handle(body: bytes) -> None:
        count.call()

    async def handle_on_loop(body: bytes) -> None:
        count.call()

    worker.on(SUBJECT, group=GROUP, concurrency=SLOTS)(handle if kind == "functions" else handle_on_loop)
    worker.run()
    _tell(count, messages)


def _work_dramatiq(url: str, messages: int) -> None:
    library: Any = import_module("dramatiq")
    ended = threading.Event()
    count = Count(messages, ended.set)
    broker, _ = _dramatiq_actor(url, count.call)
    worker = library.Worker(broker, worker_threads=SLOTS)
    worker.start()
    ended.wait(LIMIT_S)
    broker.join("default")
    _tell(count, messages)
    worker.stop()


def _work_celery(url: str, messages: int) -> None:
    def end() -> None:
        # Celery's worker ends at a signal only, and says much then; nothing of it is needed any more.
        _tell(count, messages)
        os._exit(0)

    count = Count(messages, end)
    app, _ = _celery_task(url, count.call)
    app.Worker(pool="threads", concurrency=SLOTS, loglevel="ERROR", quiet=True).start()


def _dramatiq_actor(url: str, work: Callable[[], object]) -> tuple[Any, Any]:
    library: Any = import_module("dramatiq")
    broker = import_module("dramatiq.brokers.redis").RedisBroker(url=url)
    library.set_broker(broker)
    return broker, library.actor(lambda body: work(), actor_name="handle", broker=broker)


def _celery_task(url: str, work: Callable[[], object]) -> tuple[Any, Any]:
    app: Any = import_module("celery").Celery("bench", broker=url)
    app.conf.task_ignore_result = True
    app.conf.task_acks_late = True  # As dramatiq and delayd: a task is acknowledged when it is done.
    app.conf.broker_connection_retry_on_startup = True
    app.conf.worker_enable_remote_control = False
    app.conf.worker_redirect_stdouts = False

    def handle(body: str) -> None:
        work()

    return app, app.task(name="handle")(handle)


def _need(package: str) -> None:
    if find_spec(package) is None:
        raise RedisMissing(f"the Python package {package} is not installed: pip install 'delayd[bench]'")


def main() -> None:
    """Run the worker of one side."""
    side, address, messages = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if side == "dramatiq":
        _work_dramatiq(address, messages)
    elif side == "celery":
        _work_celery(address, messages)
    else:
        _work_delayd(side, address, messages)


if __name__ == "__main__":
    main()
