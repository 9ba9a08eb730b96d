"""The task: an environment with a hidden number, which tells the player where to look."""

import random
import re


class Environment:
    """Guess a number from 1 to 50; the reward is how close the best guess came.

    Args:
        number: The hidden number.
        turns: Guesses per game.
    """

    def __init__(self, number, turns=4):
        self.number, self.turns = number, turns
        self.done, self.reward = False, 0.0

    def reset(self):
        """Return the first observation."""
        return "Guess my number from 1 to 50. Reply with a number only."

    def step(self, action):
        """Take one action, the model's text, and return the next observation."""
        self.turns -= 1
        guesses = re.findall(r"\d+", action[:100])
        if not guesses:
            self.done = self.turns == 0
            return "That is not a number."
        guess = int(guesses[-1])
        self.reward = max(self.reward, 1 - abs(guess - self.number) / 50)
        self.done = self.turns == 0 or guess == self.number
        if guess == self.number:
            return "You found it."
        return "My number is higher." if guess < self.number else "My number is lower."


def rows(size, seed):
    """Return the dataset rows; an episode gets one as ``data``."""
    draws = random.Random(seed)
    return [{"number": draws.randint(1, 50)} for _ in range(size)]
