"""Real processes on loopback."""
