"""Measurements that a user can repeat on a machine of their own. ``attention``: time, traffic and memory of ring attention.
``positions``: how exact rotary positions are far out, and how each encoding fares beyond the trained length.
"""
