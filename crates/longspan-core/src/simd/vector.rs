//! A register of numbers, and the two transcendental functions of the feature maps over it.

use super::Real;

/// A vector register.
///
/// # Safety
/// Every method may only run on a processor that has the implementor's instructions; pointers must be valid for
/// `LANES` numbers, or for as many as a method is told, with no alignment asked for.
#[allow(clippy::missing_safety_doc)]
pub trait Vector: Copy {
    type Element: Real;
    /// Numbers in a register. It divides a cache line.
    const LANES: usize;
    /// Columns of registers in one block of the matrix product; with [`TALL_ROWS`](super::product::TALL_ROWS) rows the accumulators,
    /// one row of B and one broadcast must fit the register file, if there is more than one column.
    const BLOCK_COLUMNS: usize;
    /// Whether most processors that choose these registers have a first cache of 32 kB and a second one of 512 kB or less.
    const SMALL_CACHES: bool = false;

    unsafe fn splat(x: Self::Element) -> Self;
    unsafe fn load(from: *const Self::Element) -> Self;
    unsafe fn store(self, to: *mut Self::Element);
    /// The first `count` numbers of a register, at most all, and zeros; no more is read.
    #[inline(always)]
    unsafe fn load_first(from: *const Self::Element, count: usize) -> Self {
        let mut buffer = [Self::Element::ZERO; 16];
        // SAFETY: the caller has so many numbers there, and the buffer has room for a register.
        unsafe {
            std::ptr::copy_nonoverlapping(from, buffer.as_mut_ptr(), count);
            Self::load(buffer.as_ptr())
        }
    }
    /// Writes the first `count` numbers, at most all.
    #[inline(always)]
    unsafe fn store_first(self, to: *mut Self::Element, count: usize) {
        let mut buffer = [Self::Element::ZERO; 16];
        // SAFETY: the buffer has room for a register, and the caller for so many numbers.
        unsafe {
            self.store(buffer.as_mut_ptr());
            std::ptr::copy_nonoverlapping(buffer.as_ptr(), to, count);
        }
    }
    /// Asks memory for the cache line of an address, which may be any, to have it in the second cache soon.
    #[inline(always)]
    unsafe fn fetch(_address: *const Self::Element) {}
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// `self · factor + term`, fused where the processor can.
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self;
    /// The larger; `other` where either is NaN.
    unsafe fn max(self, other: Self) -> Self;
    /// The smaller; `other` where either is NaN.
    unsafe fn min(self, other: Self) -> Self;
    /// `then` where `self > 0`, else `otherwise`.
    unsafe fn if_positive(self, then: Self, otherwise: Self) -> Self;
    /// `|self|`.
    unsafe fn abs(self) -> Self;
    /// `self`, or 0 where it has less than full precision. Processors take a hundred cycles for such a number, and a decay above ½
    /// never rounds the least ones to 0.
    #[inline(always)]
    unsafe fn normal_or_zero(self) -> Self {
        // SAFETY: forwarded to the caller.
        unsafe {
            let normal = self.abs().sub(Self::splat(Self::Element::MIN_POSITIVE));
            // NaN stays NaN.
            normal.if_positive(self, self.mul(Self::splat(Self::Element::ZERO)))
        }
    }
    /// `√self`.
    unsafe fn sqrt(self) -> Self;
    /// `2ⁿ` for `self = MAGIC + n` as [`exp_nonpositive`](Self::exp_nonpositive) forms it, with n ≥ −126 (f32) or
    /// ≥ −1022 (f64).
    unsafe fn power_of_two(self) -> Self;
    /// The sum of the lanes, in an order of the implementor's own.
    unsafe fn sum(self) -> Self::Element;
    /// The largest lane; lanes that are NaN need not count.
    #[inline(always)]
    unsafe fn largest(self) -> Self::Element {
        let mut lanes = [Self::Element::ZERO; 16];
        // SAFETY: the lanes have room for a register.
        unsafe { self.store(lanes.as_mut_ptr()) };
        lanes[1..Self::LANES].iter().fold(lanes[0], |most, &lane| most.max(lane))
    }
    /// The sums of four registers; together they may cost less.
    #[inline(always)]
    unsafe fn sums(four: [Self; 4]) -> [Self::Element; 4] {
        let [a, b, c, d] = four;
        // SAFETY: forwarded to the caller.
        unsafe { [a.sum(), b.sum(), c.sum(), d.sum()] }
    }

    /// `eˣ` for `x ≤ 0`; 0 where it would be below the least normal number; NaN for NaN; any number for `x > 0`.
    ///
    /// `x = n ln 2 + r`, `eˣ = 2ⁿ eʳ`. The sign of the input is known, so overflow needs no care.
    #[inline(always)]
    unsafe fn exp_nonpositive(self) -> Self {
        // SAFETY: forwarded to the caller.
        unsafe {
            let constant = |x: f64| Self::splat(Self::Element::from_f64(x));
            let low = constant(Self::Element::EXP_LOW);
            let bounded = low.max(self);
            let magic = constant(Self::Element::MAGIC);
            let rounded = bounded.mul_add(constant(std::f64::consts::LOG2_E), magic);
            let n = rounded.sub(magic);
            let r = n.mul_add(constant(-LN_2[0]), bounded);
            let r = n.mul_add(constant(-LN_2[1]), r);
            let coefficients = Self::Element::EXP;
            let mut y = constant(coefficients[coefficients.len() - 1]);
            for &c in coefficients[..coefficients.len() - 1].iter().rev() {
                y = y.mul_add(r, constant(c));
            }
            let y = y.mul(rounded.power_of_two());
            // Where x < low the clamp gave the least normal number: make it 0. NaN − low is not positive either, but
            // there y is NaN and so is y · 0.
            let zero = Self::splat(Self::Element::ZERO);
            self.sub(low).if_positive(y, y.mul(zero))
        }
    }

    /// Writes the transpose of a `LANES × LANES` tile.
    #[inline(always)]
    unsafe fn transpose(from: *const Self::Element, from_row: usize, to: *mut Self::Element, to_row: usize) {
        // SAFETY: the caller gives tiles of LANES rows of LANES numbers.
        unsafe {
            for row in 0..Self::LANES {
                for column in 0..Self::LANES {
                    *to.add(column * to_row + row) = *from.add(row * from_row + column);
                }
            }
        }
    }
}

/// ln 2 in two parts; the first has so few bits that n times it is exact without a fused product too.
pub(super) const LN_2: [f64; 2] = [0.693_359_375, -2.121_944_400_546_905_8e-4];

/// The constants of a number type's polynomials.
pub trait Constants: Copy + 'static {
    /// 1.5 · 2^(mantissa bits): adding it rounds to an integer and leaves that integer in the lowest bits.
    const MAGIC: f64;
    /// The least x with a normal eˣ.
    const EXP_LOW: f64;
    /// Coefficients of eʳ on |r| ≤ ln 2 / 2, ascending.
    const EXP: &'static [f64];
    /// Terms of the series atanh(s) = s·Σ s²ⁿ/(2n+1) that reach full precision for s ≤ 1/3.
    const ATANH_TERMS: usize;
    /// Terms of the series of sine and cosine that reach full precision up to π/4.
    const SINE_TERMS: usize;
}

impl Constants for f32 {
    const MAGIC: f64 = 12_582_912.0;
    const EXP_LOW: f64 = -87.336_54;
    // Interpolated at the seven Chebyshev nodes of the interval: relative error 2e-8, a third of a half unit.
    const EXP: &'static [f64] = &[
        1.0,
        1.000_000_037_716_214,
        0.500_000_004_711_775_7,
        0.166_664_155_146_532_77,
        0.041_666_352_896_775_16,
        0.008_375_126_398_153_335,
        0.001_394_110_843_397_267_4,
    ];
    const ATANH_TERMS: usize = 8;
    const SINE_TERMS: usize = 6;
}

impl Constants for f64 {
    const MAGIC: f64 = 6_755_399_441_055_744.0;
    const EXP_LOW: f64 = -708.396_418_532_264_1;
    // Taylor: the next term is below 4e-18 on the interval.
    const EXP: &'static [f64] = &[
        1.0,
        1.0,
        1.0 / 2.0,
        1.0 / 6.0,
        1.0 / 24.0,
        1.0 / 120.0,
        1.0 / 720.0,
        1.0 / 5_040.0,
        1.0 / 40_320.0,
        1.0 / 362_880.0,
        1.0 / 3_628_800.0,
        1.0 / 39_916_800.0,
        1.0 / 479_001_600.0,
        1.0 / 6_227_020_800.0,
    ];
    const ATANH_TERMS: usize = 17;
    const SINE_TERMS: usize = 9;
}

/// `σ(x)`.
///
/// # Safety
/// As for [`Vector`].
#[inline(always)]
pub unsafe fn sigmoid<V: Vector>(x: V) -> V {
    // SAFETY: forwarded to the caller.
    unsafe {
        let one = V::splat(V::Element::ONE);
        let small = V::splat(V::Element::ZERO).sub(x.abs()).exp_nonpositive();
        x.if_positive(one, small).div(one.add(small))
    }
}

/// `SiLU(x) = x·σ(x)` and its slope.
///
/// # Safety
/// As for [`Vector`].
#[inline(always)]
pub unsafe fn silu<V: Vector>(x: V) -> (V, V) {
    // SAFETY: forwarded to the caller.
    unsafe {
        let s = sigmoid(x);
        (x.mul(s), x.mul(s).mul_add(V::splat(V::Element::ONE).sub(s), s))
    }
}

/// `log(1 + y)` for `0 ≤ y ≤ 1`, as `2 atanh(y / (2 + y))`.
///
/// # Safety
/// As for [`Vector`].
#[inline(always)]
pub unsafe fn ln_1p_unit<V: Vector>(y: V) -> V {
    // SAFETY: forwarded to the caller.
    unsafe {
        let constant = |x: f64| V::splat(V::Element::from_f64(x));
        let s = y.div(y.add(constant(2.0)));
        let square = s.mul(s);
        let mut series = constant(0.0);
        let mut n = V::Element::ATANH_TERMS;
        while n > 0 {
            n -= 1;
            series = series.mul_add(square, constant(2.0 / (2 * n + 1) as f64));
        }
        s.mul(series)
    }
}
