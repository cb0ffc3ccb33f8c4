//! AVX2 with FMA, and AVX-512.

use std::arch::x86_64::*;

use super::vector::{Constants, LN_2, Vector};

/// The bits of `2^(n/16)`, less what adding `n << 19` brings back.
static ROOTS: [i32; 16] = [
    0x3f80_0000,
    0x3f7d_aac3,
    0x3f7b_95c2,
    0x3f79_c3d3,
    0x3f78_37f0,
    0x3f76_f532,
    0x3f75_fed7,
    0x3f75_583f,
    0x3f75_04f3,
    0x3f75_08a4,
    0x3f75_672a,
    0x3f76_248c,
    0x3f77_44fd,
    0x3f78_ccdf,
    0x3f7a_c0c7,
    0x3f7d_257d,
];

#[inline(always)]
fn first(count: usize) -> u32 {
    (1 << count) - 1
}

/// The same for AVX2, whose masks are numbers below 0; a lane of 64 bits is two.
#[inline(always)]
unsafe fn first_of_eight(count: usize) -> __m256i {
    static ONES_AND_ZEROS: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];
    let from = &ONES_AND_ZEROS[8 - count..][..8];
    // SAFETY: the caller has the instructions, and the array eight numbers there.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

/// One implementation: the intrinsics that differ only by their names, and the rest written out.
macro_rules! vector {
    (
        $name:ident, $register:ident, $element:ident, $lanes:literal, $columns:literal, $small_caches:literal,
        $splat:ident, $load:ident, $store:ident, $fma:ident, $sqrt:ident, [$($binary:ident: $of_two:ident),*],
        $($rest:item)*
    ) => {
        #[derive(Clone, Copy)]
        pub struct $name($register);

        impl Vector for $name {
            type Element = $element;
            const LANES: usize = $lanes;
            const BLOCK_COLUMNS: usize = $columns;
            const SMALL_CACHES: bool = $small_caches;

            #[inline(always)]
            unsafe fn splat(x: $element) -> Self {
                // SAFETY: the caller has the instructions.
                Self(unsafe { $splat(x) })
            }
            #[inline(always)]
            unsafe fn load(from: *const $element) -> Self {
                // SAFETY: the caller has the instructions and a pointer valid for a register.
                Self(unsafe { $load(from) })
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $element) {
                // SAFETY: the caller has the instructions and a pointer valid for a register.
                unsafe { $store(to, self.0) }
            }
            #[inline(always)]
            unsafe fn fetch(address: *const $element) {
                // SAFETY: the caller has the instructions; an address that is not there is passed over.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
            }
            #[inline(always)]
            unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
                // SAFETY: the caller has the instructions.
                Self(unsafe { $fma(self.0, factor.0, term.0) })
            }
            #[inline(always)]
            unsafe fn sqrt(self) -> Self {
                // SAFETY: the caller has the instructions.
                Self(unsafe { $sqrt(self.0) })
            }
            $(#[inline(always)]
            unsafe fn $binary(self, other: Self) -> Self {
                // SAFETY: the caller has the instructions. Those of `max` and `min` give `other` where either is NaN.
                Self(unsafe { $of_two(self.0, other.0) })
            })*
            $(#[inline(always)] $rest)*
        }
    };
}

vector! {
    F32x16, __m512, f32, 16, 4, false,
    _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps, _mm512_sqrt_ps,
    [add: _mm512_add_ps, sub: _mm512_sub_ps, mul: _mm512_mul_ps, div: _mm512_div_ps,
     max: _mm512_max_ps, min: _mm512_min_ps],

    unsafe fn load_first(from: *const f32, count: usize) -> Self {
        // SAFETY: the caller has the instructions and so many numbers; others are not read.
        Self(unsafe { _mm512_maskz_loadu_ps(first(count) as __mmask16, from) })
    }
    unsafe fn store_first(self, to: *mut f32, count: usize) {
        // SAFETY: the caller has the instructions and room for so many numbers; others are not written.
        unsafe { _mm512_mask_storeu_ps(to, first(count) as __mmask16, self.0) }
    }
    unsafe fn if_positive(self, then: Self, otherwise: Self) -> Self {
        // SAFETY: the caller has the instructions.
        Self(unsafe {
            let positive = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, _mm512_setzero_ps());
            _mm512_mask_blend_ps(positive, otherwise.0, then.0)
        })
    }
    unsafe fn abs(self) -> Self {
        // SAFETY: the caller has the instructions.
        Self(unsafe { _mm512_abs_ps(self.0) })
    }
    unsafe fn power_of_two(self) -> Self {
        // SAFETY: the caller has the instructions.
        Self(unsafe {
            let n = _mm512_add_epi32(_mm512_castps_si512(self.0), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(n))
        })
    }
    unsafe fn sum(self) -> f32 {
        // SAFETY: the caller has the instructions.
        unsafe { _mm512_reduce_add_ps(self.0) }
    }
    unsafe fn largest(self) -> f32 {
        // SAFETY: the caller has the instructions.
        unsafe { _mm512_reduce_max_ps(self.0) }
    }
    // `n` in sixteenths: a register holds 2^(0/16) … 2^(15/16), and eʳ for the |r| < 0.022 that is left takes three terms.
    // Shifted, the number of sixteenths adds its whole part to the exponent of what the table gives for the rest.
    unsafe fn exp_nonpositive(self) -> Self {
        /// Adding it rounds to sixteenths and leaves their number in the lowest bits.
        const MAGIC: f32 = 786_432.0;
        // SAFETY: the caller has the instructions.
        Self(unsafe {
            let constant = |x: f64| _mm512_set1_ps(x as f32);
            let rounded = _mm512_fmadd_ps(self.0, constant(std::f64::consts::LOG2_E), _mm512_set1_ps(MAGIC));
            let n = _mm512_sub_ps(rounded, _mm512_set1_ps(MAGIC));
            let r = _mm512_fnmadd_ps(n, constant(LN_2[0]), self.0);
            let r = _mm512_fnmadd_ps(n, constant(LN_2[1]), r);
            let sixteenths = _mm512_castps_si512(rounded);
            let roots = _mm512_permutexvar_epi32(sixteenths, _mm512_loadu_si512(ROOTS.as_ptr().cast()));
            let power = _mm512_castsi512_ps(_mm512_add_epi32(roots, _mm512_slli_epi32::<19>(sixteenths)));
            let series = _mm512_fmadd_ps(r, constant(1.0 / 6.0), constant(0.5));
            let series = _mm512_fmadd_ps(series, r, constant(1.0));
            // True for NaN too.
            let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(self.0, constant(f32::EXP_LOW));
            _mm512_maskz_fmadd_ps(normal, _mm512_mul_ps(power, r), series, power)
        })
    }
    unsafe fn sums(four: [Self; 4]) -> [f32; 4] {
        let [a, b, c, d] = four.map(|x| x.0);
        let mut sums = [0.0; 4];
        // SAFETY: the caller has the instructions; `sums` holds what is stored.
        unsafe {
            // Each 128-bit lane holds sums of two numbers of a and b, then of four numbers of a, b, c and d.
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
            let (low, high) = (_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd));
            let x = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
            let x = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            _mm_storeu_ps(sums.as_mut_ptr(), x);
        }
        sums
    }
    unsafe fn transpose(from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
        // SAFETY: the caller has the instructions and tiles of 16 rows of 16 numbers.
        unsafe {
            let mut r = [_mm512_setzero_ps(); 16];
            for (row, register) in r.iter_mut().enumerate() {
                *register = _mm512_loadu_ps(from.add(row * from_row));
            }
            // Pairs of rows, then quadruples: r[4g + c] holds, in its 128-bit lane l, rows 4g..4g+4 of column 4l + c.
            for g in (0..16).step_by(4) {
                let (a, b) = (_mm512_unpacklo_ps(r[g], r[g + 1]), _mm512_unpackhi_ps(r[g], r[g + 1]));
                let (c, d) = (_mm512_unpacklo_ps(r[g + 2], r[g + 3]), _mm512_unpackhi_ps(r[g + 2], r[g + 3]));
                let pd = |x| _mm512_castps_pd(x);
                r[g] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(a), pd(c)));
                r[g + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(a), pd(c)));
                r[g + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(b), pd(d)));
                r[g + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(b), pd(d)));
            }
            // The same between the lanes: 0x88 takes the even ones of both operands, 0xdd the odd ones.
            for c in 0..4 {
                let even = _mm512_shuffle_f32x4::<0x88>(r[c], r[4 + c]);
                let odd = _mm512_shuffle_f32x4::<0xdd>(r[c], r[4 + c]);
                let even_below = _mm512_shuffle_f32x4::<0x88>(r[8 + c], r[12 + c]);
                let odd_below = _mm512_shuffle_f32x4::<0xdd>(r[8 + c], r[12 + c]);
                _mm512_storeu_ps(to.add(c * to_row), _mm512_shuffle_f32x4::<0x88>(even, even_below));
                _mm512_storeu_ps(to.add((4 + c) * to_row), _mm512_shuffle_f32x4::<0x88>(odd, odd_below));
                _mm512_storeu_ps(to.add((8 + c) * to_row), _mm512_shuffle_f32x4::<0xdd>(even, even_below));
                _mm512_storeu_ps(to.add((12 + c) * to_row), _mm512_shuffle_f32x4::<0xdd>(odd, odd_below));
            }
        }
    }
}

vector! {
    F64x8, __m512d, f64, 8, 4, false,
    _mm512_set1_pd, _mm512_loadu_pd, _mm512_storeu_pd, _mm512_fmadd_pd, _mm512_sqrt_pd,
    [add: _mm512_add_pd, sub: _mm512_sub_pd, mul: _mm512_mul_pd, div: _mm512_div_pd,
     max: _mm512_max_pd, min: _mm512_min_pd],

    unsafe fn load_first(from: *const f64, count: usize) -> Self {
        // SAFETY: the caller has the instructions and so many numbers; others are not read.
        Self(unsafe { _mm512_maskz_loadu_pd(first(count) as __mmask8, from) })
    }
    unsafe fn store_first(self, to: *mut f64, count: usize) {
        // SAFETY: the caller has the instructions and room for so many numbers; others are not written.
        unsafe { _mm512_mask_storeu_pd(to, first(count) as __mmask8, self.0) }
    }
    unsafe fn if_positive(self, then: Self, otherwise: Self) -> Self {
        // SAFETY: the caller has the instructions.
        Self(unsafe {
            let positive = _mm512_cmp_pd_mask::<_CMP_GT_OQ>(self.0, _mm512_setzero_pd());
            _mm512_mask_blend_pd(positive, otherwise.0, then.0)
        })
    }
    unsafe fn abs(self) -> Self {
        // SAFETY: the caller has the instructions.
        Self(unsafe { _mm512_abs_pd(self.0) })
    }
    unsafe fn power_of_two(self) -> Self {
        // SAFETY: the caller has the instructions.
        Self(unsafe {
            let n = _mm512_add_epi64(_mm512_castpd_si512(self.0), _mm512_set1_epi64(1023));
            _mm512_castsi512_pd(_mm512_slli_epi64::<52>(n))
        })
    }
    unsafe fn sum(self) -> f64 {
        // SAFETY: the caller has the instructions.
        unsafe { _mm512_reduce_add_pd(self.0) }
    }
    unsafe fn largest(self) -> f64 {
        // SAFETY: the caller has the instructions.
        unsafe { _mm512_reduce_max_pd(self.0) }
    }
}

vector! {
    F32x8, __m256, f32, 8, 2, true,
    _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps, _mm256_sqrt_ps,
    [add: _mm256_add_ps, sub: _mm256_sub_ps, mul: _mm256_mul_ps, div: _mm256_div_ps,
     max: _mm256_max_ps, min: _mm256_min_ps],

    unsafe fn load_first(from: *const f32, count: usize) -> Self {
        // SAFETY: the caller has the instructions and so many numbers; others are not read.
        Self(unsafe { _mm256_maskload_ps(from, first_of_eight(count)) })
    }
    unsafe fn store_first(self, to: *mut f32, count: usize) {
        // SAFETY: the caller has the instructions and room for so many numbers; others are not written.
        unsafe { _mm256_maskstore_ps(to, first_of_eight(count), self.0) }
    }
    unsafe fn if_positive(self, then: Self, otherwise: Self) -> Self {
        // SAFETY: the caller has the instructions.
        Self(unsafe {
            let positive = _mm256_cmp_ps::<_CMP_GT_OQ>(self.0, _mm256_setzero_ps());
            _mm256_blendv_ps(otherwise.0, then.0, positive)
        })
    }
    unsafe fn abs(self) -> Self {
        // SAFETY: the caller has the instructions.
        Self(unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0) })
    }
    unsafe fn power_of_two(self) -> Self {
        // SAFETY: the caller has the instructions.
        Self(unsafe {
            let n = _mm256_add_epi32(_mm256_castps_si256(self.0), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(n))
        })
    }
    unsafe fn sum(self) -> f32 {
        // SAFETY: the caller has the instructions.
        unsafe {
            let x = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
        }
    }
    unsafe fn transpose(from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
        // SAFETY: the caller has the instructions and tiles of 8 rows of 8 numbers.
        unsafe {
            let mut r = [_mm256_setzero_ps(); 8];
            for (row, register) in r.iter_mut().enumerate() {
                *register = _mm256_loadu_ps(from.add(row * from_row));
            }
            for g in [0, 4] {
                let (a, b) = (_mm256_unpacklo_ps(r[g], r[g + 1]), _mm256_unpackhi_ps(r[g], r[g + 1]));
                let (c, d) = (_mm256_unpacklo_ps(r[g + 2], r[g + 3]), _mm256_unpackhi_ps(r[g + 2], r[g + 3]));
                r[g] = _mm256_shuffle_ps::<0x44>(a, c);
                r[g + 1] = _mm256_shuffle_ps::<0xee>(a, c);
                r[g + 2] = _mm256_shuffle_ps::<0x44>(b, d);
                r[g + 3] = _mm256_shuffle_ps::<0xee>(b, d);
            }
            for c in 0..4 {
                _mm256_storeu_ps(to.add(c * to_row), _mm256_permute2f128_ps::<0x20>(r[c], r[4 + c]));
                _mm256_storeu_ps(to.add((4 + c) * to_row), _mm256_permute2f128_ps::<0x31>(r[c], r[4 + c]));
            }
        }
    }
}

vector! {
    F64x4, __m256d, f64, 4, 2, true,
    _mm256_set1_pd, _mm256_loadu_pd, _mm256_storeu_pd, _mm256_fmadd_pd, _mm256_sqrt_pd,
    [add: _mm256_add_pd, sub: _mm256_sub_pd, mul: _mm256_mul_pd, div: _mm256_div_pd,
     max: _mm256_max_pd, min: _mm256_min_pd],

    unsafe fn load_first(from: *const f64, count: usize) -> Self {
        // SAFETY: the caller has the instructions and so many numbers; others are not read.
        Self(unsafe { _mm256_maskload_pd(from, first_of_eight(2 * count)) })
    }
    unsafe fn store_first(self, to: *mut f64, count: usize) {
        // SAFETY: the caller has the instructions and room for so many numbers; others are not written.
        unsafe { _mm256_maskstore_pd(to, first_of_eight(2 * count), self.0) }
    }
    unsafe fn if_positive(self, then: Self, otherwise: Self) -> Self {
        // SAFETY: the caller has the instructions.
        Self(unsafe {
            let positive = _mm256_cmp_pd::<_CMP_GT_OQ>(self.0, _mm256_setzero_pd());
            _mm256_blendv_pd(otherwise.0, then.0, positive)
        })
    }
    unsafe fn abs(self) -> Self {
        // SAFETY: the caller has the instructions.
        Self(unsafe { _mm256_andnot_pd(_mm256_set1_pd(-0.0), self.0) })
    }
    unsafe fn power_of_two(self) -> Self {
        // SAFETY: the caller has the instructions.
        Self(unsafe {
            let n = _mm256_add_epi64(_mm256_castpd_si256(self.0), _mm256_set1_epi64x(1023));
            _mm256_castsi256_pd(_mm256_slli_epi64::<52>(n))
        })
    }
    unsafe fn sum(self) -> f64 {
        // SAFETY: the caller has the instructions.
        unsafe {
            let x = _mm_add_pd(_mm256_castpd256_pd128(self.0), _mm256_extractf128_pd::<1>(self.0));
            _mm_cvtsd_f64(_mm_add_sd(x, _mm_unpackhi_pd(x, x)))
        }
    }
}
