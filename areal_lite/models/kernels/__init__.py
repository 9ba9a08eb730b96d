"""Operations of decoders in C++ and in torch, and the compiler for the former.

Each pair (``*_kernels`` and ``*_operations``) computes the same; without a compiler the torch one runs.
"""
