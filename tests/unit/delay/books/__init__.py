"""Tests of the delay server's books: outcomes, seals, and hours that end."""
