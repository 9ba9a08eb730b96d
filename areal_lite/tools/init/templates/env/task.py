"""The task: an environment with a hidden number, which tells the player where to look."""

import random
import re
from areal_lite.environments import Step, WrongAction


class GuessNumber:
    """Guess a number from 1 to 50. The rewards of an episode sum up to how close the best guess came.

    Args:
        turns: Guesses per game.
    """

    def __init__(self, turns=4):
        self.turns, self.best = turns, 0.0

    async def reset(self, row, seed):
        """Begin a game and return what the model reads first; ``seed`` is the same for all episodes of a row."""
        self.number = random.Random(seed).randint(1, 50)
        return "Guess my number from 1 to 50. Reply with a number only."

    async def step(self, action):
        """Take the model's text; return what it reads next, the reward of this guess, and whether the game is over."""
        guesses = re.findall(r"\d+", action[:100])
        if not guesses:
            raise WrongAction("That is not a number.")  # the model reads this and replies again
        guess = int(guesses[-1])
        gain = max(0.0, 1 - abs(guess - self.number) / 50 - self.best)
        self.turns, self.best = self.turns - 1, self.best + gain
        text = "My number is higher." if guess < self.number else "My number is lower."
        return Step(text, reward=gain, done=self.turns <= 0 or guess == self.number)

    async def close(self):
        """Release what the game holds: nothing."""
