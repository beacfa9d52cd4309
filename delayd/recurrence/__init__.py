"""Recurrence: when something recurs, and which of its occurrences run (docs/recurring.md).

Nothing here has a clock, a file or a connection: each call gets its instants, and the same call gives the same answer
on every machine with the same package tzdata.

A map, from the ground up.

    zones       eras in which the clocks of a zone keep one offset from UTC, from the package tzdata
    cron_line   the days and times of a cron line
    recurrence  what a user says about when something recurs; the instants of it, and its form for msgpack
    deciding    which occurrences run after a wait, a pause or an outage, and why each other one is skipped

Words. An *occurrence* is one instant of a recurrence. It is *decided* once: it runs, or it is skipped for a reason. It
is *missed* when it is decided more than a minute late.
"""
