"""Read-only views of a data directory, live, stopped or copied; `delayd.reading.books` audits one."""
