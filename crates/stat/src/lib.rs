//! Counters and latency histograms of a disk in shared memory, and their reader.
