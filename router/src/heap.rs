//! Large values on the heap.

/// Puts the value that `make` returns on the heap, where it is made. `Box::new(make())` has it made on the stack and copies all
/// of it: for a future also the memory that it uses only later.
#[inline]
pub(crate) fn boxed<T>(make: impl FnOnce() -> T) -> Box<T> {
    Box::write(Box::new_uninit(), make())
}
