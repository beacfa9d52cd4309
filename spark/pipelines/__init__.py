"""Pipelines: questions about the logs of a fleet, each one frame made of the tables of the data source (docs/spark.md).

A map, from the outside in. Each of the other files is one job: a function from frames to a frame.

    run         ``delayd spark JOB``: reads the directories, makes the frame, writes it or hands its rows over
    lateness    how many messages of each subject and day left, and how late
    forecast    what falls due, against a capacity and quotas, and the fullest seconds
    anomalies   days on which a subject's volume, lateness or failures left their usual range
    what_if     a schedule at another rate, or with another number of servers
    consumers   what became of messages in groups of consumers
"""
