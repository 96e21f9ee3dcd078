//! The io_uring engine: executor, storages, buffers, adaptive polling, and the seeded simulator.
