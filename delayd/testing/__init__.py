"""Fakes that stand in for disk, clock, executor and state, for tests here and elsewhere.

A map.

    clock               a clock that a test moves
    disk, tree          a disk in memory that loses power, fails syncs and fills up; the files in it
    executor            runs jobs at once, or when the test says so
    state               the key-value state, in memory
"""
