"""What one lone send passes on its way, as counts that fail when the way grows."""

from bench.stays import Stay, count_stays

# Functions and files, measured and rounded up by a twentieth: each is one more place that a reader has to know.
STAYS_MAX = {"receipt": (215, 46), "outcome": (362, 85)}
SENDS = 10
# On a busy machine each of ten sends in a row may meet the same delay, such as an answer in two reads. What a send
# always passes is in every further count, too.
COUNTS_MAX = 6


def test_the_way_of_a_lone_send_has_no_more_functions_and_files_than_these() -> None:
    ways = count_stays(SENDS)
    for _ in range(COUNTS_MAX - 1):
        if all(_fits(name, stays) for name, stays in ways.items()):
            break
        ways = {name: ways[name] & stays for name, stays in count_stays(SENDS).items()}
    for name, stays in ways.items():
        # The way was seen from its begin to its end.
        assert ("delayd/client/sending/send_options.py", "Sends.send_nowait") in stays
        assert ("delayd/log/log.py", "Log.flush") in stays
        assert _fits(name, stays), sorted(stays)


def _fits(name: str, stays: set[Stay]) -> bool:
    functions_max, files_max = STAYS_MAX[name]
    return len(stays) <= functions_max and len({file for file, _ in stays}) <= files_max
