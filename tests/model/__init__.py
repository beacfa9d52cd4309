"""Explicit-state models, searched breadth first: the handoff (docs/handoff.md), and what a realtime server offers
before it is durable (rule L2).
"""
