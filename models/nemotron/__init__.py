"""Nemotron (dense)."""
