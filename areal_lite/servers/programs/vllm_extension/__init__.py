"""On the ``PYTHONPATH`` of vLLM servers; holds nothing but what they load, because their packages differ from ours."""
