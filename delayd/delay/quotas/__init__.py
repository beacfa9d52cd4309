"""Quotas: what may be pending for a subject, and which instants are least loaded (docs/quotas.md).

A map, from the ground up.

    seconds     how many messages of one subject are due in each second; the least loaded instants of a window
    counting    the counted rows, by sequence, so that an outcome takes off the right row once; reads them from the logs
    quotas      the quotas of a server: judges batches, counts, sets limits

Words. A *tally* is what is counted of one subject. A subject is *counted* once its rows of before are in the tally.
"""
