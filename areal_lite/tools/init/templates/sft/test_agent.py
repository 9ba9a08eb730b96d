"""Tests of the conversations."""

from unittest import TestCase
from my_agent.task import rows


class RowsTest(TestCase):
    def test_every_conversation_ends_with_an_answer(self):
        for row in rows(size=20, seed=1):
            self.assertEqual([message["role"] for message in row["messages"]], ["user", "assistant"])
            self.assertTrue(all(message["content"] for message in row["messages"]))

    def test_rows_are_the_same_each_time(self):
        self.assertEqual(rows(size=20, seed=1), rows(size=20, seed=1))
