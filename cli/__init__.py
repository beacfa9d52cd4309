"""The command line: it reads logs, talks to servers and starts them through the launcher (docs/cli.md).

A map. A command lives in the file of its name; `main` gathers them.

    main, programs      the command ``delayd``, and the programs that it may start but must not import
    options, exits, times   options that commands share, exit codes, instants and durations as people write them
    operate             what commands of operators share: whom they ask, what a decision costs, what was answered
Messages
    send, consume, message   send one or many, and take what is due; `interrupt`: Ctrl-C; `waiting`: who is away
    pending             what is pending, asked of the running servers
    which, bulk         messages by receipts or keys, and all of a window
    work, app           run a worker, and find the one that was named; `worker_processes`: several of them, and
                        `sources`: the files that start them again when they change
Servers
    up, supervisor, child, serve, lines   start one server or all of them, and show what they write
    ask                 ask servers
    status, top, servers, subjects, groups   what serves, who has what, how far consumers are
    dead                messages that no handler could work on
    route, slots, target   an operator's word; `draining`: how a server is emptied
    mend                what servers can't read: listed, taken, released, given up
Files
    log, dump, dump_other, damage   whether files check, and what they hold
    schedule, dispatch, hour_schedule, hour_range   messages hour by hour, and what became of them
    find                messages by what they say
    forecast, quota_of  what falls due in each period ahead, and the quota that it is held against
    trace               one message through all logs
    backup              copies of servers, and putting them back
    cut, cutting        servers that keep one moment, for copies that fit each other
    audit, acceptances, seals   the books, what operators accept of their findings, and the seals
    export, progress    tables for other engines
What is shown
    completion, offers, known_names   what a shell offers while a command line is typed
    listing, table      one renderer for every listing
"""
