"""Child processes that never outlive their parent, and what a process may tell of itself.

Promises that a child ends with the process that started it, however that ends. May import ``errors`` and ``files``;
called by every room that starts something.
"""
