"""Makes ``spark.read.format("delayd")`` work without registration: Spark looks for modules that are named like this.

It is imported in every Spark session of this Python, so it does nothing but one guarded import.
"""

try:
    from delayd.programs import find

    DefaultSource = find("spark.source").DelaydDataSource
except ImportError:
    pass  # An environment that lacks a part of the extra `spark` has other sources to offer, and keeps them.
