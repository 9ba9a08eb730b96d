"""Dumped episodes found, shown, exported, plotted and scored again. Read dumps, then dump_index and filters."""
