//! Sines and cosines of large angles.
//!
//! Angles are counted in *turns* (2π), in `f64`: taking off whole turns is exact, so a rounding of the angle is the
//! rounding of its rate alone, at position 10⁷ as at position 1.

use crate::simd::rows::put;
use crate::simd::{Constants, Real, Vector, operation};

/// 1/2π, and what rounding took from it.
const PER_RADIAN: [f64; 2] = [0.159_154_943_091_895_35, -9.839_338_337_591_243e-18];

/// Whether a number type notices what rounding a rate takes from it: an `f32` rate times a count of steps below 2²⁴ is
/// exact in `f64` and loses nothing that `f32` would notice.
pub(crate) const fn is_double<T>() -> bool {
    size_of::<T>() == size_of::<f64>()
}

// Turns for every `step`-th of `radians`, and for `f64` what rounding took from each.
//
// These loops stand here for the instructions: fused products and roundings of `f64` are calls into the C library where a
// processor may lack them.
operation!(TurnRates, |radians: &'a [T], step: usize, turns: &'a mut [f64], rests: &'a mut [f64]| {
    if step == 1 {
        turns.iter_mut().zip(radians).for_each(|(turns, radians)| *turns = radians.to_f64() * PER_RADIAN[0]);
    } else {
        let radians = radians.iter().step_by(step);
        turns.iter_mut().zip(radians).for_each(|(turns, radians)| *turns = radians.to_f64() * PER_RADIAN[0]);
    }
    if is_double::<V::Element>() {
        for ((rest, &turns), radians) in rests.iter_mut().zip(&*turns).zip(radians.iter().step_by(step)) {
            let radians = radians.to_f64();
            *rest = radians.mul_add(PER_RADIAN[0], -turns) + radians * PER_RADIAN[1];
        }
    }
});

// Adds to `to` the turns after so many steps, without whole ones; if `exact`, the rests too.
operation!(AddTurns, f64, |exact: bool, turns: &'a [f64], rests: &'a [f64], steps: f64, to: &'a mut [f64]| {
    if exact {
        for ((to, rate), rest) in to.iter_mut().zip(turns).zip(rests) {
            let turns = rate * steps;
            *to += (turns - turns.round_ties_even()) + (rate.mul_add(steps, -turns) + rest * steps);
        }
    } else {
        for (to, rate) in to.iter_mut().zip(turns) {
            let turns = rate * steps;
            *to += turns - turns.round_ties_even();
        }
    }
});

/// Angles brought to one eighth of a turn in one go; they stand on the stack.
const BATCH: usize = 64;

// `cos 2πt` and `sin 2πt` for each of `turns`, of any size; NaN for what is not finite.
operation!(CosSin, |turns: &'a [f64], cos: &'a mut [T], sin: &'a mut [T]| {
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
        for at in (0..turns.len()).step_by(V::LANES) {
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
                let turned_cos = odd.if_positive(turned.mul(near_sin), sign.mul(near_cos));
                let turned_sin = odd.if_positive(n.mul(near_cos), sign.mul(near_sin));
                let (to_cos, to_sin) = (cos[at..].as_mut_ptr(), sin[at..].as_mut_ptr());
                let left = turns.len().min(cos.len()).min(sin.len()) - at;
                if left >= V::LANES {
                    put::<V, true>(turned_cos, to_cos, left);
                    put::<V, true>(turned_sin, to_sin, left);
                } else {
                    put::<V, false>(turned_cos, to_cos, left);
                    put::<V, false>(turned_sin, to_sin, left);
                }
            }
        }
    }
});

/// `cos x` and `sin x` for |x| ≤ π/4, by their series.
#[inline(always)]
unsafe fn cos_sin_eighth<V: Vector>(x: V) -> (V, V) {
    // SAFETY: forwarded to the caller.
    unsafe {
        let number = |x: f64| V::splat(V::Element::from_f64(x));
        let square = x.mul(x);
        let (mut cos, mut sin) = (number(0.0), number(0.0));
        let mut n = <V::Element as Constants>::SINE_TERMS;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{InstructionSet, dispatch_to};

    fn worst<T: Real>(set: InstructionSet) -> f64 {
        let mut worst = 0.0f64;
        for start in [0.0, -3.0, 1e7, -1e7] {
            let turns: Vec<f64> = (0..4001).map(|n| start + f64::from(n) * 1.2345e-3).collect();
            let (mut cos, mut sin) = (vec![T::ZERO; turns.len()], vec![T::ZERO; turns.len()]);
            // SAFETY: the processor has the set.
            unsafe { dispatch_to(set, CosSin { turns: &turns, cos: &mut cos, sin: &mut sin }) };
            for ((turn, cos), sin) in turns.iter().zip(cos).zip(sin) {
                let angle = (turn - turn.round()) * std::f64::consts::TAU;
                let errors = [cos.to_f64() - angle.cos(), sin.to_f64() - angle.sin()].map(f64::abs);
                worst = errors.into_iter().fold(worst, |most, x| if x > most || x.is_nan() { x } else { most });
            }
        }
        worst
    }

    #[test]
    fn sines_are_those_of_the_library() {
        for set in InstructionSet::available() {
            // Half a unit of the result, and the roundings of the argument and of the series.
            let (f32s, f64s) = (worst::<f32>(set), worst::<f64>(set));
            assert!(f32s < 1.5 * f64::from(f32::EPSILON), "{set:?}: {f32s:e}");
            assert!(f64s < 2.5 * f64::EPSILON, "{set:?}: {f64s:e}");
        }
    }

    #[test]
    fn quarters_are_exact() {
        for set in InstructionSet::available() {
            let (mut cos, mut sin) = ([7.0f32; 6], [7.0f32; 6]);
            let turns = [0.0, 0.25, 0.5, 0.75, 1e7, f64::NAN];
            // SAFETY: the processor has the set.
            unsafe { dispatch_to(set, CosSin { turns: &turns, cos: &mut cos, sin: &mut sin }) };
            assert_eq!(cos[..5], [1.0, 0.0, -1.0, 0.0, 1.0], "{set:?}");
            assert_eq!(sin[..5], [0.0, 1.0, 0.0, -1.0, 0.0], "{set:?}");
            assert!(cos[5].is_nan() && sin[5].is_nan(), "{set:?}");
        }
    }
}
