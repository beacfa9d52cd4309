"""The thread behind the blocking clients."""

import threading
from collections import deque

from delayd.client.blocking import LoopThread, Work


def test_a_close_whose_stop_is_taken_before_it_wakes_the_loop_ends_the_thread_like_any_other() -> None:
    thread = LoopThread("test")
    stopping = threading.Event()

    class Inbox(deque[Work]):
        """Says when the stop is in it, and holds up its caller until the loop has taken it."""

        def append(self, work: Work) -> None:
            super().append(work)
            if work == thread.loop.stop:
                stopping.set()
                thread._thread.join(30)

    thread._inbox = Inbox()

    def hold() -> None:
        stopping.wait(30)

    thread.post(hold)
    thread.close()
    assert thread.loop.is_closed() and not thread._thread.is_alive()
