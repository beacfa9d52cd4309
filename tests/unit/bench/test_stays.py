"""What one lone message passes on its way, as counts that fail when the way grows."""

from bench.stays import Way, count_stays

# Functions and files, measured and rounded up by a twentieth: each is one more place that a reader has to know.
STAYS_MAX = {"receipt": (225, 48), "outcome": (377, 74), "ack": (556, 92), "cancel": (439, 70)}
SENDS = 10
# On a busy machine each of ten messages in a row may meet the same delay, such as an answer in two reads. What one
# always passes is in every further count, too.
COUNTS_MAX = 6


def test_the_way_of_a_lone_send_has_no_more_functions_and_files_than_these() -> None:
    ways = count_stays(SENDS)
    for _ in range(COUNTS_MAX - 1):
        over = [name for name, way in ways.items() if not _fits(name, way)]
        if not over:
            break
        ways |= {name: ways[name].common(way) for name, way in count_stays(SENDS, over).items()}
    for name, way in ways.items():
        # The way was seen from its begin to its end.
        assert ("delayd/log/log.py", "LogWrite.end") in way.stays
        assert _fits(name, way), (len(way.stays), len(way.files), sorted(way.stays))
    for name in ("receipt", "outcome", "ack"):
        assert ("delayd/client/sending/send_options.py", "Sends.send_nowait") in ways[name].stays


def _fits(name: str, way: Way) -> bool:
    functions_max, files_max = STAYS_MAX[name]
    return len(way.stays) <= functions_max and len(way.files) <= files_max
