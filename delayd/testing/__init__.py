"""For tests here and elsewhere: fakes that stand in for disk, clock, executor and state, and what clients promise.

A map.

    conformance         what the public clients promise, as tests that run against any home (docs/testing.md)

    clock               a clock that a test moves
    disk, tree          a disk in memory that loses power, fails syncs and fills up; the files in it
    executor            runs jobs at once, or when the test says so
    state               the key-value state, in memory
"""
