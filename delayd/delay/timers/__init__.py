"""Timers: rows of the coming hours, in memory, until they are due (rules P5, P7).

A map, from the disk to the instant at which a row is due.

    earlier             which rows an earlier life of this server handed over, by the dispatch logs
    claimed             rows in the wheel that have ended: they are held back when they fall due
    ledger              the gate: no row that has ended enters the wheel or leaves it
    hours               where the rows of an hour may stand
    loader, loading     read the schedule logs of the coming hours, some minutes ahead, and those of hours that have
                        passed, many at a time
    wheel               the timers of all loaded hours
    hour_wheel, ready   one hour of it, and the rows whose slots are open
"""
