"""The command line in this process: its texts, its exit codes, and what it hands to programs."""
