"""Measurements that a user can repeat on a machine of their own. ``attention``: time, traffic and memory of ring attention."""
