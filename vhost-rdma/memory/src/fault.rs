//! Why memory that a guest names is not resolved.

/// Why a page list or a page was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// An address is outside guest memory or not aligned.
    Address,
    /// The list itself is malformed, or too small for what it describes.
    Shape,
    /// The guest has more page lists than its memory is worth.
    Room,
}
