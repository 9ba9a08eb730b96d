from tests.fixtures.tiny_policies import tiny, untied

__all__ = ["tiny", "untied"]
