from __future__ import annotations
import numpy as np
import pytest
from tests.trainer.training_data import sequence


def test_the_first_token_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match="first token"):
        sequence([1, 2], [0])


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="versions has 1 entries but input_ids has 2"):
        sequence([1, 2], [1], versions=np.array([0]).tolist())
