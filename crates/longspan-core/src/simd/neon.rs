//! NEON, which every 64-bit Arm processor has.

use std::arch::aarch64::*;

use super::vector::Vector;

/// One implementation: the intrinsics that differ only by their names, and the rest written out.
macro_rules! vector {
    (
        $name:ident, $register:ident, $element:ident, $lanes:literal, $bits:literal, $bias:literal,
        $splat:ident, $load:ident, $store:ident, $fma:ident, $greater:ident, $positive:ident, $select:ident, $sum:ident,
        [$($unary:ident: $of_one:ident),*], [$($binary:ident: $of_two:ident),*],
        $to_bits:ident, $from_bits:ident, $add_bits:ident, $splat_bits:ident, $shift:ident,
        $transpose:item
    ) => {
        #[derive(Clone, Copy)]
        pub struct $name($register);

        impl Vector for $name {
            type Element = $element;
            const LANES: usize = $lanes;
            // 32 registers: 24 accumulators, four of B and the broadcast fit.
            const BLOCK_COLUMNS: usize = 4;

            #[inline(always)]
            unsafe fn splat(x: $element) -> Self {
                // SAFETY: every processor of the target has the instructions.
                Self(unsafe { $splat(x) })
            }
            #[inline(always)]
            unsafe fn load(from: *const $element) -> Self {
                // SAFETY: the caller has a pointer valid for a register.
                Self(unsafe { $load(from) })
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $element) {
                // SAFETY: the caller has a pointer valid for a register.
                unsafe { $store(to, self.0) }
            }
            #[inline(always)]
            unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
                // SAFETY: every processor of the target has the instructions.
                Self(unsafe { $fma(term.0, self.0, factor.0) })
            }
            // The instructions for the larger and the smaller number have their own mind about NaN: compare and select.
            #[inline(always)]
            unsafe fn max(self, other: Self) -> Self {
                // SAFETY: every processor of the target has the instructions.
                Self(unsafe { $select($greater(self.0, other.0), self.0, other.0) })
            }
            #[inline(always)]
            unsafe fn min(self, other: Self) -> Self {
                // SAFETY: every processor of the target has the instructions.
                Self(unsafe { $select($greater(other.0, self.0), self.0, other.0) })
            }
            #[inline(always)]
            unsafe fn if_positive(self, then: Self, otherwise: Self) -> Self {
                // SAFETY: every processor of the target has the instructions.
                Self(unsafe { $select($positive(self.0), then.0, otherwise.0) })
            }
            #[inline(always)]
            unsafe fn power_of_two(self) -> Self {
                // SAFETY: every processor of the target has the instructions.
                Self(unsafe { $from_bits($shift::<$bits>($add_bits($to_bits(self.0), $splat_bits($bias)))) })
            }
            #[inline(always)]
            unsafe fn sum(self) -> $element {
                // SAFETY: every processor of the target has the instructions.
                unsafe { $sum(self.0) }
            }
            $(#[inline(always)]
            unsafe fn $unary(self) -> Self {
                // SAFETY: every processor of the target has the instructions.
                Self(unsafe { $of_one(self.0) })
            })*
            $(#[inline(always)]
            unsafe fn $binary(self, other: Self) -> Self {
                // SAFETY: every processor of the target has the instructions.
                Self(unsafe { $of_two(self.0, other.0) })
            })*
            #[inline(always)]
            $transpose
        }
    };
}

vector! {
    F32x4, float32x4_t, f32, 4, 23, 127,
    vdupq_n_f32, vld1q_f32, vst1q_f32, vfmaq_f32, vcgtq_f32, vcgtzq_f32, vbslq_f32, vaddvq_f32,
    [abs: vabsq_f32, sqrt: vsqrtq_f32], [add: vaddq_f32, sub: vsubq_f32, mul: vmulq_f32, div: vdivq_f32],
    vreinterpretq_u32_f32, vreinterpretq_f32_u32, vaddq_u32, vdupq_n_u32, vshlq_n_u32,
    unsafe fn transpose(from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
        // SAFETY: the caller has tiles of 4 rows of 4 numbers.
        unsafe {
            let [a, b, c, d]: [float32x4_t; 4] = std::array::from_fn(|row| vld1q_f32(from.add(row * from_row)));
            // Pairs of rows, then pairs of pairs: 64 bits hold two numbers of one column.
            let pairs = |x, y| (vreinterpretq_f64_f32(vtrn1q_f32(x, y)), vreinterpretq_f64_f32(vtrn2q_f32(x, y)));
            let ((even, odd), (even_below, odd_below)) = (pairs(a, b), pairs(c, d));
            vst1q_f32(to, vreinterpretq_f32_f64(vtrn1q_f64(even, even_below)));
            vst1q_f32(to.add(to_row), vreinterpretq_f32_f64(vtrn1q_f64(odd, odd_below)));
            vst1q_f32(to.add(2 * to_row), vreinterpretq_f32_f64(vtrn2q_f64(even, even_below)));
            vst1q_f32(to.add(3 * to_row), vreinterpretq_f32_f64(vtrn2q_f64(odd, odd_below)));
        }
    }
}

vector! {
    F64x2, float64x2_t, f64, 2, 52, 1023,
    vdupq_n_f64, vld1q_f64, vst1q_f64, vfmaq_f64, vcgtq_f64, vcgtzq_f64, vbslq_f64, vaddvq_f64,
    [abs: vabsq_f64, sqrt: vsqrtq_f64], [add: vaddq_f64, sub: vsubq_f64, mul: vmulq_f64, div: vdivq_f64],
    vreinterpretq_u64_f64, vreinterpretq_f64_u64, vaddq_u64, vdupq_n_u64, vshlq_n_u64,
    unsafe fn transpose(from: *const f64, from_row: usize, to: *mut f64, to_row: usize) {
        // SAFETY: the caller has tiles of 2 rows of 2 numbers.
        unsafe {
            let (a, b) = (vld1q_f64(from), vld1q_f64(from.add(from_row)));
            vst1q_f64(to, vtrn1q_f64(a, b));
            vst1q_f64(to.add(to_row), vtrn2q_f64(a, b));
        }
    }
}
