//! Vector instructions: one dispatch point.

/// A number type with vector code; sealed, implemented for `f32` and `f64`.
pub trait Element: Copy {}
impl Element for f32 {}
impl Element for f64 {}
