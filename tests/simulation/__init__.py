"""Whole clusters on one seed and a virtual clock."""
