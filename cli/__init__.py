"""The command line: it reads logs, talks to servers and starts them through the launcher (docs/cli.md).

A map. A group of commands lives in one file; `main` gathers them.

    main, programs      the command ``delayd``, and the programs that it may start but must not import
    options, exits, times   options that commands share, exit codes, instants and durations as people write them
    listing             one renderer for every listing, and progress
    ask, operate        ask servers; what operators' commands share: whom they ask, what a decision costs, the answers
    completion          what a shell offers while a command line is typed
Messages
    send, consume       send one or many, and take what is due
    message, bulk       messages by receipts or keys, what is pending, and all of a window
    work                run a worker in one process or several
Servers
    serve, supervisor, child, lines   start one server or all of them, and show what they write
    status, top, servers, subjects, groups   what serves, who has what, how far consumers are; an operator's words on it
    route, slots, target   who has which subjects and keys, and realtime servers that lost data
    mend                what servers can't read: listed, taken, released, given up
    backup              copies of servers, putting them back, and one moment for all of them
Files
    log                 whether files check, and what they hold
    schedule, hours     messages hour by hour, and what became of them
    find, trace         messages by what they say, and one message through all logs
    forecast            what falls due in each period ahead, and the quota that it is held against
    audit, seals        the books, what operators accept of their findings, and the seals
    export              tables for other engines
"""
