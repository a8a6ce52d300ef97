"""The suite: every available way of saving memory, on the same steps, in one process.

    PYTHONPATH=src python -m benchmarks.suite --quick

Problem: figures for one tool alone say nothing. Invariant: all methods share one set of parameters
and one stream of data; peaks are counted allocation by allocation, the methods are timed in turns,
bits are compared with the plain step's, and a method that fails is a row that says so.

    cases      the networks and their sizes: tiny, for the CPU, for one large GPU
    methods    how a network is prepared: by hand, by its library, by torch, by lowtide
    contest    one network, all methods: peaks, bits, seconds
    largest    the largest batch in a given memory, and samples per second at it
    summary    lowtide against each peer at that peer's peak; tables
    pictures   seconds against memory, one picture per network

Rejected: a process for each method, whose times would depend on what else the machine was doing.
"""
