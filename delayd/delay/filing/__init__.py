"""Filing: what the message log holds goes into the schedule logs of its hours (rules P2 to P4; docs/formats).

A map, in the order in which a checkpoint works.

    pending             rows that no checkpoint has filed yet
    checkpointer        files, counts and publishes what the message log holds
    log_range           reads a stretch of the message log by columns
    schedule_writer     writes that stretch into the schedule logs of its hours
    schedule_log        reads what a checkpoint counts of one hour's file, and finds the batch that holds a row
    hour_table          says up to where each schedule log is valid, and what an operator has said of it

Words. A row is *filed* when it stands in the schedule log of its hour. The *replay offset* of a checkpoint divides
the message log: rows below it are filed and counted, rows above it are *pending*, and a start replays them. The file
*beside* a damaged log takes the rows that belong into that log until it is restored.
"""
