//! How much memory a request's task takes: for the tests that bound it.

/// The length of the future that `make` makes, in bytes. None is made.
pub(crate) fn of<R, F>(_make: impl Fn(R) -> F) -> usize {
    size_of::<F>()
}
