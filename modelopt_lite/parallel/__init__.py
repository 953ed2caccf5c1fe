"""Runs of many processes: who owns which experts, and how ranks talk to each other.

The only package that imports ``torch.distributed``.
"""
