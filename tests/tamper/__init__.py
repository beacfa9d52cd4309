"""Lies with valid checksums, each told to the audit; and directories that tell none."""
