"""The ledger: whether a row has ended, and whether a target may have it (docs/keys.md; rules C1, C2, P7, H5).

Where a row is between its send and its seal, and who knows of it for how long:

    the row                               stands in              for how long                    the ledger says
    is durable, its hour is not loaded    the pending rows       until a checkpoint files it     PENDING
    is filed, its hour is not loaded      the schedule log       until the hour is loaded        PENDING, by the files
    is of a loaded hour                   the wheel              until it falls due              PENDING
    waits for its target, or a route      `Dispatcher`           until it leaves                 PENDING
    can't be read                         `HeldRows`             until it can                    PENDING
    may have left in an earlier life      any of these           until its target has answered   IN_FLIGHT
    is at its target                      a link's window        until the outcome is durable    IN_FLIGHT
    has an outcome that is not durable    `OutcomeLog`           until the next flush            IN_FLIGHT
    is ended by the commit under way      the ledger, open       until the commit is durable     IN_FLIGHT
    is ended by a decision                `Owed`                 until its outcome is durable    what it ended as
    has a durable outcome                 the dispatch log       until retention removes it      what the file says

Besides, the ledger notes rows that have ended by their hours, as long as their hour may still be loaded, or they may
stand in the wheel: these pass no gate.

A map:

    ledger          the one part that is asked: the gates, where a row is, what became of it, claims
    wanted          rows of a question, as they are compared with rows in memory and with those that wait for targets
    owed            rows that a durable decision has ended, until their outcomes are durable
    files           what schedule logs and dispatch logs say of rows that are nowhere in memory
"""
