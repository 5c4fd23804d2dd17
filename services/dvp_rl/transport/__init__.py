"""Redis transport: job and group streams, replica registry, verdict rules, fail points.

Delivery is at least once; effects happen once. Every state transition is one Lua script that validates the caller
(owner of the entry, fencing token of the trainer) before its first write, because Lua does not roll back.
"""
