//! Sines and cosines of large angles, and the rotation of blocks of features by them.
//!
//! Angles are counted in *turns* (2π), in doubles: taking off whole turns is exact, so a rounding of the angle is the
//! rounding of its rate alone, at position 10⁷ as at position 1.

use super::vector::{Constants, Vector};
use crate::real::Real;

/// Angles brought to one eighth of a turn in one go; they stand on the stack.
const BATCH: usize = 64;

/// `cos 2πt` and `sin 2πt` for each of `turns`, of any size; NaN for what is not finite.
#[inline(always)]
pub(crate) unsafe fn cos_sin<V: Vector>(turns: &[f64], cos: &mut [V::Element], sin: &mut [V::Element])
where
    V::Element: Constants,
{
    let zero = V::Element::ZERO;
    for ((turns, cos), sin) in turns.chunks(BATCH).zip(cos.chunks_mut(BATCH)).zip(sin.chunks_mut(BATCH)) {
        let (mut quarters, mut rest) = ([zero; BATCH], [zero; BATCH]);
        for ((&turn, quarter), rest) in turns.iter().zip(&mut quarters).zip(&mut rest) {
            // Adding and taking off 1.5·2⁵² rounds to an integer, in every instruction set and without a call.
            const MAGIC: f64 = 6_755_399_441_055_744.0;
            let part = turn - turn.round_ties_even();
            let n = (4.0 * part + MAGIC) - MAGIC;
            *quarter = V::Element::from_f64(n);
            *rest = V::Element::from_f64((part - 0.25 * n) * std::f64::consts::TAU);
        }
        let (mut c, mut s) = ([zero; BATCH], [zero; BATCH]);
        let mut at = 0;
        while at < turns.len() {
            // SAFETY: LANES divides the length of the arrays.
            unsafe {
                let (n, x) = (V::load(quarters.as_ptr().add(at)), V::load(rest.as_ptr().add(at)));
                let (near_cos, near_sin) = cos_sin_eighth(x);
                // n = ±1: (cos, sin) → (∓sin, ±cos); n = ±2: both change sign.
                let number = |x: f64| V::splat(V::Element::from_f64(x));
                let size = n.abs();
                let odd = number(0.5).sub(size.sub(number(1.0)).abs());
                let sign = number(1.5).sub(size).if_positive(number(1.0), number(-1.0));
                let turned = number(0.0).sub(n);
                odd.if_positive(turned.mul(near_sin), sign.mul(near_cos)).store(c.as_mut_ptr().add(at));
                odd.if_positive(n.mul(near_cos), sign.mul(near_sin)).store(s.as_mut_ptr().add(at));
            }
            at += V::LANES;
        }
        let count = turns.len();
        cos.copy_from_slice(&c[..count]);
        sin.copy_from_slice(&s[..count]);
    }
}

/// `cos x` and `sin x` for |x| ≤ π/4, by their series.
#[inline(always)]
unsafe fn cos_sin_eighth<V: Vector>(x: V) -> (V, V)
where
    V::Element: Constants,
{
    // SAFETY: forwarded to the caller.
    unsafe {
        let number = |x: f64| V::splat(V::Element::from_f64(x));
        let square = x.mul(x);
        let (mut cos, mut sin) = (number(0.0), number(0.0));
        let mut n = V::Element::SINE_TERMS;
        while n > 0 {
            n -= 1;
            cos = cos.mul_add(square, number(SERIES[2 * n]));
            sin = sin.mul_add(square, number(SERIES[2 * n + 1]));
        }
        (cos, sin.mul(x))
    }
}

/// Coefficients of `cos x + sin x`, ascending: ±1/n!.
const SERIES: [f64; 20] = {
    let mut series = [1.0; 20];
    let mut factorial = 1.0;
    let mut n = 1;
    while n < 20 {
        factorial *= n as f64;
        series[n] = if n % 4 < 2 { 1.0 } else { -1.0 } / factorial;
        n += 1;
    }
    series
};

/// How a row of `m` features is turned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Every feature by an angle of its own into a pair: `[x cos, x sin]`, 2m features.
    Each,
    /// Feature `k` and feature `k + m/2` as a pair, in place: m features.
    Pairs,
}

/// The angles of a block of rows: row `r` has the angle of `base` plus that of row `r` of `cos` and `sin`.
#[derive(Clone, Copy)]
pub(crate) struct Angles<'a, T> {
    pub cos: &'a [T],
    pub sin: &'a [T],
    /// From one row's angles to the next.
    pub row: usize,
    /// Cosines and sines of what all rows have in common.
    pub base: [&'a [T]; 2],
}

/// Features `x`, turned, and unturned beside it where `rest` is given.
pub(crate) struct Rotation<'a, T> {
    pub turn: Turn,
    /// Rows of `width` features, each as far from the next as `x_row`.
    pub x: &'a [T],
    pub x_row: usize,
    pub count: usize,
    pub width: usize,
    pub angles: Angles<'a, T>,
    /// Numbers from one block of the turned row to the next.
    pub stride: usize,
    /// What the unturned features are multiplied by.
    pub rest: Option<&'a [T]>,
}

impl<T: Real> Rotation<'_, T> {
    /// Blocks before the unturned one.
    fn turned(&self) -> usize {
        match self.turn {
            Turn::Each => 2,
            Turn::Pairs => 1,
        }
    }
}

/// Writes turned rows. Numbers that belong to no feature become 0.
#[inline(always)]
pub(crate) unsafe fn rotate<V: Vector>(r: &Rotation<'_, V::Element>, to: &mut [V::Element], to_row: usize) {
    let (width, stride) = (r.width, r.stride);
    for row in 0..r.count {
        let x = &r.x[row * r.x_row..][..width];
        let (cos, sin) = (&r.angles.cos[row * r.angles.row..], &r.angles.sin[row * r.angles.row..]);
        let to = &mut to[row * to_row..][..to_row];
        let (turned, after) = to.split_at_mut(r.turned() * stride);
        match r.turn {
            Turn::Each => {
                let (cos, sin) = (&cos[..width], &sin[..width]);
                let (base_cos, base_sin) = (&r.angles.base[0][..width], &r.angles.base[1][..width]);
                let (first, second) = turned.split_at_mut(stride);
                first[width..].fill(V::Element::ZERO);
                second[width..].fill(V::Element::ZERO);
                let (first, second) = (&mut first[..width], &mut second[..width]);
                for k in 0..width {
                    first[k] = x[k] * (base_cos[k] * cos[k] - base_sin[k] * sin[k]);
                    second[k] = x[k] * (base_sin[k] * cos[k] + base_cos[k] * sin[k]);
                }
            }
            Turn::Pairs => {
                let half = width / 2;
                let (cos, sin) = (&cos[..half], &sin[..half]);
                let (base_cos, base_sin) = (&r.angles.base[0][..half], &r.angles.base[1][..half]);
                turned[width..].fill(V::Element::ZERO);
                let (first, second) = turned[..width].split_at_mut(half);
                let (low, high) = x.split_at(half);
                for k in 0..half {
                    let c = base_cos[k] * cos[k] - base_sin[k] * sin[k];
                    let s = base_sin[k] * cos[k] + base_cos[k] * sin[k];
                    first[k] = low[k] * c - high[k] * s;
                    second[k] = low[k] * s + high[k] * c;
                }
            }
        }
        let Some(rest) = r.rest else {
            after.fill(V::Element::ZERO);
            continue;
        };
        let (unturned, nothing) = after.split_at_mut(width);
        nothing.fill(V::Element::ZERO);
        for ((to, &x), &rest) in unturned.iter_mut().zip(x).zip(&rest[..width]) {
            *to = x * rest;
        }
    }
}

/// Where the gradients of a rotation go.
pub(crate) struct Unrotated<'a, T> {
    /// The gradients of turned rows; on return the first block of each holds those of the angles.
    pub d: &'a mut [T],
    pub d_row: usize,
    /// What each pair of [`Turn::Each`] was multiplied by beside its angle, if not 1.
    pub gain: Option<&'a [T]>,
    /// The gradients of the features, in rows like those of [`Rotation::x`].
    pub dx: &'a mut [T],
    /// Sums over rows of the gradients of `gain` and [`Rotation::rest`], added to; empty if not wanted.
    pub d_gain: &'a mut [T],
    pub d_rest: &'a mut [T],
}

/// Takes gradients of turned rows back to features, angles and factors. The base angles are those without `gain`.
#[inline(always)]
pub(crate) unsafe fn unrotate<V: Vector>(r: &Rotation<'_, V::Element>, to: &mut Unrotated<'_, V::Element>) {
    let (width, stride) = (r.width, r.stride);
    for row in 0..r.count {
        let x = &r.x[row * r.x_row..][..width];
        let (cos, sin) = (&r.angles.cos[row * r.angles.row..], &r.angles.sin[row * r.angles.row..]);
        let dx = &mut to.dx[row * r.x_row..][..r.x_row];
        dx[width..].fill(V::Element::ZERO);
        let dx = &mut dx[..width];
        let d = &mut to.d[row * to.d_row..][..to.d_row];
        let (turned, after) = d.split_at_mut(r.turned() * stride);
        match r.turn {
            Turn::Each => {
                let (cos, sin) = (&cos[..width], &sin[..width]);
                let (base_cos, base_sin) = (&r.angles.base[0][..width], &r.angles.base[1][..width]);
                let (first, second) = turned.split_at_mut(stride);
                let (first, second) = (&mut first[..width], &second[..width]);
                for k in 0..width {
                    let c = base_cos[k] * cos[k] - base_sin[k] * sin[k];
                    let s = base_sin[k] * cos[k] + base_cos[k] * sin[k];
                    let along = first[k] * c + second[k] * s;
                    first[k] = x[k] * (second[k] * c - first[k] * s);
                    dx[k] = along;
                }
                if !to.d_gain.is_empty() {
                    for ((sum, &along), &x) in to.d_gain[..width].iter_mut().zip(&*dx).zip(x) {
                        *sum += along * x;
                    }
                }
                if let Some(gain) = to.gain {
                    for ((dx, angle), &gain) in dx.iter_mut().zip(first).zip(&gain[..width]) {
                        *dx *= gain;
                        *angle *= gain;
                    }
                }
            }
            Turn::Pairs => {
                let half = width / 2;
                let (cos, sin) = (&cos[..half], &sin[..half]);
                let (base_cos, base_sin) = (&r.angles.base[0][..half], &r.angles.base[1][..half]);
                let (first, second) = turned[..width].split_at_mut(half);
                let (low, high) = x.split_at(half);
                let (d_low, d_high) = dx.split_at_mut(half);
                for k in 0..half {
                    let c = base_cos[k] * cos[k] - base_sin[k] * sin[k];
                    let s = base_sin[k] * cos[k] + base_cos[k] * sin[k];
                    d_low[k] = first[k] * c + second[k] * s;
                    d_high[k] = second[k] * c - first[k] * s;
                    first[k] = low[k] * d_high[k] - high[k] * d_low[k];
                }
            }
        }
        let Some(rest) = r.rest else { continue };
        let unturned = &after[..width];
        if !to.d_rest.is_empty() {
            for ((sum, &g), &x) in to.d_rest[..width].iter_mut().zip(unturned).zip(x) {
                *sum += g * x;
            }
        }
        for ((dx, &g), &rest) in dx.iter_mut().zip(unturned).zip(&rest[..width]) {
            *dx += g * rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::real::Real;
    use crate::simd::{Element, InstructionSet};

    fn worst<T: Real>() -> f64 {
        let ops = <T as Element>::ops();
        let mut worst = 0.0f64;
        for start in [0.0, -3.0, 1e7, -1e7] {
            let turns: Vec<f64> = (0..4001).map(|n| start + f64::from(n) * 1.2345e-3).collect();
            let (mut cos, mut sin) = (vec![T::ZERO; turns.len()], vec![T::ZERO; turns.len()]);
            ops.cos_sin(&turns, &mut cos, &mut sin);
            for ((turn, cos), sin) in turns.iter().zip(cos).zip(sin) {
                let angle = (turn - turn.round()) * std::f64::consts::TAU;
                worst = worst.max((cos.to_f64() - angle.cos()).abs()).max((sin.to_f64() - angle.sin()).abs());
            }
        }
        worst
    }

    #[test]
    fn sines_are_those_of_the_library() {
        InstructionSet::selected().expect("a known instruction set");
        // Half a unit of the result, and the roundings of the argument and of the series.
        assert!(worst::<f32>() < 1.5 * f64::from(f32::EPSILON), "{:e}", worst::<f32>());
        assert!(worst::<f64>() < 2.5 * f64::EPSILON, "{:e}", worst::<f64>());
    }

    #[test]
    fn quarters_are_exact() {
        let (mut cos, mut sin) = ([7.0f32; 6], [7.0f32; 6]);
        <f32 as Element>::ops().cos_sin(&[0.0, 0.25, 0.5, 0.75, 1e7, f64::NAN], &mut cos, &mut sin);
        assert_eq!(cos[..5], [1.0, 0.0, -1.0, 0.0, 1.0]);
        assert_eq!(sin[..5], [0.0, 1.0, 0.0, -1.0, 0.0]);
        assert!(cos[5].is_nan() && sin[5].is_nan());
    }
}
