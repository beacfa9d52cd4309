"""Timers: rows of the coming hours, in memory, until they are due (rules P5, P7).

A map, from the disk to the instant at which a row is due.

    loading             reads the schedule logs of the coming hours, some minutes ahead, and those of hours that have
                        passed, many at a time; where the rows of an hour may stand
    wheel               the timers of all loaded hours
    hour_wheel          one hour of it, and the rows whose slots are open
"""
