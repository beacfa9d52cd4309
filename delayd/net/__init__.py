"""Servers and connections: the asyncio shell around delayd.wire."""
