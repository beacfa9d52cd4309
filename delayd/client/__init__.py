"""Producers and consumers, blocking and asynchronous."""
