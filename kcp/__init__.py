"""kcp: context-parallel training of Kimi Delta Attention (KDA) in MindSpore and MindFormers.

Importing this package is light: no MindSpore, no MindFormers. See ``kcp.ops`` for the operator and its stages,
``kcp.parallel`` for what crosses ranks, ``kcp.layers`` for the layers, ``kcp.models`` and ``kcp.train`` for training runs.
"""

__version__ = "0.1.0"
