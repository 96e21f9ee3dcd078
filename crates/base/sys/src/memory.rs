//! Memory that the allocator keeps.

/// Gives memory that is free back to the kernel. Locks the heaps while it looks at them.
pub fn give_back() {
    // SAFETY: malloc_trim takes a number and touches nothing of ours.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}
