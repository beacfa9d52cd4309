"""Books: each row's outcome, and the seal of an hour whose books are complete (rules S1 to S4; docs/formats/seal.md).

A map, from an outcome to the end of an hour.

    outcomes            writes the dispatch logs of the hours, opens and reads them
    retention           seals hours whose books are complete, and deletes sealed hours when they are old
    sealing             compares the two logs of an hour, and writes the seal
"""
