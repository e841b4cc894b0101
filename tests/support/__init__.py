"""Helpers of several tests: tiny models, processes under test."""
