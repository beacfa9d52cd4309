"""Views: tables of directories and archives as one, cut into parts that many processes read (docs/spark-tables.md).

A map, from the question to the rows. Importing it needs pyarrow.

    query       which rows and columns of which view are asked for
    planning    which hours lie where, and which part reads which of them
    parts       the rows of a part
    held        what targets hold of an hour, from their logs and from archives
"""
