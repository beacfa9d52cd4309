"""The command line: reads logs, talks to servers and starts them through the launcher."""
