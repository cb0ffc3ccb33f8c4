//! The two number types of the kernels.

use std::fmt::{Debug, Display};
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, DivAssign, Mul, MulAssign, Neg, Sub, SubAssign};

/// `f32` or `f64`.
pub trait Real:
    Copy
    + Debug
    + Display
    + Default
    + PartialOrd
    + Send
    + Sync
    + 'static
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + DivAssign
    + Sum
    + super::Registers
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// The distance from 1 to the next number.
    const EPSILON: Self;
    /// The least positive number with full precision.
    const MIN_POSITIVE: Self;
    /// −∞.
    const NEG_INFINITY: Self;
    /// Rounds a double.
    fn from_f64(x: f64) -> Self;
    /// Widens to a double.
    fn to_f64(self) -> f64;
    /// `eˣ`.
    fn exp(self) -> Self;
    /// `log(1 + x)`.
    fn ln_1p(self) -> Self;
    /// `|x|`.
    fn abs(self) -> Self;
    /// Neither infinite nor NaN.
    fn is_finite(self) -> bool;
    /// Whether a denominator holds nothing: 0, or so small that its inverse would overflow (keys that a decay has all but
    /// erased). Such a row gives 0.
    fn vanishes(self) -> bool {
        self.abs() < Self::MIN_POSITIVE
    }
    /// The larger of two; the other where one is NaN.
    fn max(self, other: Self) -> Self;
}

macro_rules! real {
    ($t:ident) => {
        impl Real for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const EPSILON: Self = $t::EPSILON;
            const MIN_POSITIVE: Self = $t::MIN_POSITIVE;
            const NEG_INFINITY: Self = $t::NEG_INFINITY;
            fn from_f64(x: f64) -> Self {
                x as $t
            }
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
            fn exp(self) -> Self {
                $t::exp(self)
            }
            fn ln_1p(self) -> Self {
                $t::ln_1p(self)
            }
            fn abs(self) -> Self {
                $t::abs(self)
            }
            fn is_finite(self) -> bool {
                $t::is_finite(self)
            }
            fn max(self, other: Self) -> Self {
                $t::max(self, other)
            }
        }
    };
}
real!(f32);
real!(f64);
