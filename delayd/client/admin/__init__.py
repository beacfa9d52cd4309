"""Admin: what operators ask of a running cluster, and decide about it, from a program (docs/admin.md).

A map.

    ask          one question, to one server that meta knows
    groups       consumer groups at realtime servers, and decisions about one of them
    letters      dead letters of a group, and what is to come to it again, at delay servers
    quotas       what subjects may have at delay servers
    admin        AsyncAdmin: all of it, awaited; and Admin, its blocking form
"""
