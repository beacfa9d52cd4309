"""Tests of what the delay server does about files that are damaged or gone."""
