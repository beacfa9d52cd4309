"""What a server stands on: ports, for which `delayd.testing` has fakes, and what is behind them.

    clock       the time by which servers fire and stamp
    alarms      what parts do by the clock: they say when, and the shell asks how long it may sleep
    executor    pure work beside the loop
    lane        what the loop asks of the thread of an executor, and system calls without the interpreter's lock
    disk        reads, writes and syncs
    open_files  the descriptors of a disk: a bounded number serves any number of files
    state       a small durable map of keys to values, with the decisions of operators
    identity    the log_id, the epoch and the place of a server's directory, and which process holds it
    histogram   how many values of a kind there were, on a logarithmic scale
    operating   what an operator must see: waits, fences, and log lines whose rate a peer controls

A core gets these as arguments, so it runs the same in a process, in a home and in the simulation.
"""
