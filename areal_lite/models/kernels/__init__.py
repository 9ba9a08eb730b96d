"""Operations of the trainer's decoder in torch and in C++, attention in other layouts, and the compiler.

Promises that the compiled operations of a file compute what its torch operations do, to rounding; without a compiler
the latter run. May import the files of ``models``, but no decoder; called by the decoders, and by the trainer for
scores. Read compiler, score_kernels, fused_decoder_kernels, then the two files on attention.
"""
