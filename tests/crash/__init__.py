"""Workloads that die at each of their disk operations and recover."""
