"""Tokenized answers and preference pairs for supervised runs.

Promises that every item trains at least one token and has its row's number. Read tokenized_dataset (rows to items),
then sft_dataset and preference_dataset. Imports ``data.chat`` and ``data.rows``; called by ``runs.supervised_run``.
"""
