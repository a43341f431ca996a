"""``kcp selftest``: is the op right on this machine, and how fast? One report file, to be sent back from machines that we do not have."""
