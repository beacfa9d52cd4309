"""Makes ``spark.read.format("delayd")`` work without registration: Spark imports modules named ``pyspark_*``.

    spark.read.format("delayd").option("view", "lifecycle").load("/var/lib/delayd")

`help(DefaultSource)` lists the options. Every Spark session of this Python imports the module, so it does nothing but
one guarded import. For `spark-submit`, which takes a file of Python, the file is the command ``delayd``.
"""

import sys

try:
    from delayd.programs import find

    DefaultSource = find("spark.source").DelaydDataSource
except ImportError:
    pass  # The extra `spark` is not installed as a whole. Other data sources of this environment must go on working.

if __name__ == "__main__":
    from delayd.__main__ import main

    sys.exit(main())
