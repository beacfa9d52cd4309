"""What one lone send passes on its way, as counts that fail when the way grows."""

from bench.stays import count_stays

# Functions and files, measured and rounded up by a twentieth: each is one more place that a reader has to know.
STAYS_MAX = {"receipt": (195, 48), "outcome": (350, 82)}
SENDS = 10


def test_the_way_of_a_lone_send_has_no_more_functions_and_files_than_these() -> None:
    for name, stays in count_stays(SENDS).items():
        functions_max, files_max = STAYS_MAX[name]
        # The way was seen from its begin to its end.
        assert ("delayd/client/sending/producer.py", "Producer.send") in stays
        assert ("delayd/log/log.py", "Log.flush") in stays
        assert len(stays) <= functions_max, sorted(stays)
        assert len({file for file, _ in stays}) <= files_max, sorted(stays)
