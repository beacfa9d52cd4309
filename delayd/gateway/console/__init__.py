"""The console: pages for people at ``/`` of the gateway, made here from what the servers say (docs/console.md).

A map, from a request to the page.

    console     which page a path is; errors become pages, too
    desk        what pages share: clients, the clock, what forms bring
    overview    what is due when, how late it is, what waits for an operator; servers, groups, quotas
    subjects    subjects, and the groups of one
    pending     pending messages of a subject: found, looked at, cancelled, moved, sent anew in another form
    letters     dead letters of a group: looked at, sent again, deleted
    targets     push targets
    sessions    sign-in with a token, and what it allows
    schedules   recurring schedules, and their next occurrences
    audits      audits that were written to a folder
    audit_folder  the files of that folder, whatever somebody has put there
    drawing     sections of a page, and how each is drawn; texts of instants and counts
    templates/  HTML; static/ has the style that the report of an audit does not have
"""
