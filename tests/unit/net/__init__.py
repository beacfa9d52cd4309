"""Connections over loopback sockets, the timer, and the shell of a program."""
