"""Parts of cpu_peers.py: the contenders, their processes and models, the machine's state, the table."""
