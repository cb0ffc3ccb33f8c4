//! Vectors as arrays: compiled everywhere, left to the compiler to vectorise.

use super::vector::Vector;

/// Eight numbers in an array.
#[derive(Clone, Copy)]
pub struct Array<T>([T; 8]);

macro_rules! portable {
    ($t:ident, $bits:ident, $mantissa:literal, $bias:literal) => {
        impl Array<$t> {
            // Loops: each array made by a closure would be compiled as functions of its own first.
            #[inline(always)]
            fn zip(mut self, other: Self, f: impl Fn($t, $t) -> $t) -> Self {
                for lane in 0..8 {
                    self.0[lane] = f(self.0[lane], other.0[lane]);
                }
                self
            }
            #[inline(always)]
            fn map(mut self, f: impl Fn($t) -> $t) -> Self {
                for lane in 0..8 {
                    self.0[lane] = f(self.0[lane]);
                }
                self
            }
        }

        impl Vector for Array<$t> {
            type Element = $t;
            const LANES: usize = 8;
            const BLOCK_COLUMNS: usize = 1;

            #[inline(always)]
            unsafe fn splat(x: $t) -> Self {
                Self([x; 8])
            }
            #[inline(always)]
            unsafe fn load(from: *const $t) -> Self {
                // SAFETY: the caller's pointer is valid for eight numbers.
                Self(unsafe { from.cast::<[$t; 8]>().read_unaligned() })
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $t) {
                // SAFETY: the caller's pointer is valid for eight numbers.
                unsafe { to.cast::<[$t; 8]>().write_unaligned(self.0) }
            }
            #[inline(always)]
            unsafe fn add(self, other: Self) -> Self {
                self.zip(other, |a, b| a + b)
            }
            #[inline(always)]
            unsafe fn sub(self, other: Self) -> Self {
                self.zip(other, |a, b| a - b)
            }
            #[inline(always)]
            unsafe fn mul(self, other: Self) -> Self {
                self.zip(other, |a, b| a * b)
            }
            #[inline(always)]
            unsafe fn div(self, other: Self) -> Self {
                self.zip(other, |a, b| a / b)
            }
            #[inline(always)]
            unsafe fn mul_add(mut self, factor: Self, term: Self) -> Self {
                for lane in 0..8 {
                    // Without the instruction a fused product is a call into the C library.
                    self.0[lane] = if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
                        self.0[lane].mul_add(factor.0[lane], term.0[lane])
                    } else {
                        self.0[lane] * factor.0[lane] + term.0[lane]
                    };
                }
                self
            }
            #[inline(always)]
            unsafe fn max(self, other: Self) -> Self {
                self.zip(other, |a, b| if a > b { a } else { b })
            }
            #[inline(always)]
            unsafe fn min(self, other: Self) -> Self {
                self.zip(other, |a, b| if a < b { a } else { b })
            }
            #[inline(always)]
            unsafe fn if_positive(mut self, then: Self, otherwise: Self) -> Self {
                for lane in 0..8 {
                    self.0[lane] = if self.0[lane] > 0.0 { then.0[lane] } else { otherwise.0[lane] };
                }
                self
            }
            #[inline(always)]
            unsafe fn abs(self) -> Self {
                self.map($t::abs)
            }
            #[inline(always)]
            unsafe fn sqrt(self) -> Self {
                self.map($t::sqrt)
            }
            #[inline(always)]
            unsafe fn power_of_two(self) -> Self {
                self.map(|x| $t::from_bits(x.to_bits().wrapping_add($bias) << $mantissa))
            }
            #[inline(always)]
            unsafe fn sum(self) -> $t {
                let x = self.0;
                ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]))
            }
        }
    };
}
portable!(f32, u32, 23, 127);
portable!(f64, u64, 52, 1023);
