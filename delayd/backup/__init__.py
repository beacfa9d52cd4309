"""Backup: copies the directories of running or stopped servers, and puts such copies back (docs/backup.md).

A map.

    manifest    what a backup holds, file by file; without it a backup is not whole
    journal     which files are copied already, so that a second call goes on
    copying     one file after the other, with checksums
    sources     which files of a server belong to a backup, and how much of each
    take        a whole backup, from its sources to its manifest
    restore     a backup put into the place of servers
"""
