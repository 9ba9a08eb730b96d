"""Every ended group as JSON lines, written off the event loop.

Read trajectory_dumper (the run's side), dump_writer (the process), dump_lines (the format) and dump_reader.
"""
