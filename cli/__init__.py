"""The command line: it reads logs, talks to servers and starts them through the launcher (docs/cli.md).

A map. A group of commands lives in one file; `main` gathers them.

    main                    the command ``delayd``, exit codes, and the programs that it may start but must not import
    shared_options, times   options that commands share, instants and durations as people write them
    listing                 one renderer for every listing, and progress
    operate                 what operators' commands share: whom they ask, what a decision costs, the answers
    completion              what a shell offers while a command line is typed
Messages
    send, consume_command   send one or many, and take what is due
    cron_commands, cron_options   recurring schedules, and the options that say when they fire
    message_commands        messages by receipts or keys, what is pending, and all of a window
    work                    run a worker in one process or several
Servers
    gateway_command, push_commands   serve HTTP, and where due messages are POSTed to
    serve, child            start one server or all of them, watch them, and show what they write
    status_command, servers   what serves, and an operator's words on it
    token_commands          which clients are let in, and what each may do
    subject_commands, group_commands   who has what, how far consumers are, and an operator's words on it
    owners                  who has which subjects and keys, and realtime servers that lost data
    mend                    what servers can't read: listed, taken, released, given up
    backup_commands         copies of servers, putting them back, and one moment for all of them
Files
    log_commands            whether files check, and what they hold
    schedule, hour_commands   messages hour by hour, what falls due ahead, and what became of them
    file_commands           messages by what they say, one message through all logs, and tables for other engines
    archive_command         sealed hours as Parquet files, put into an archive
    proof_commands          proofs for outsiders: signed, made and checked
    spark_commands          jobs for Spark
    sql_command             queries over directories and archives
    audit_commands, page_file   the books, what operators accept of their findings, and the seals
"""
