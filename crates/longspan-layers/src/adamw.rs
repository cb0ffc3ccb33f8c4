//! AdamW (Loshchilov and Hutter 2019), all of a step in one pass over a parameter.
//!
//! With the gradient `g` of step `t`, from 1 on: `m ← β₁ m + (1 − β₁) g`, `v ← β₂ v + (1 − β₂) g²`,
//! `x ← (1 − r λ) x − r (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)` for a rate `r` and a decay `λ`.

use longspan_core::error::{Error, expect};
use longspan_core::simd::rows::{load_part, store_part};
use longspan_core::simd::{dispatch, operation};
use longspan_core::threads::share_many;

/// Numbers of a task: four times 64 kB, which a second-level cache holds.
const PIECE: usize = 1 << 14;

/// The constants of all steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// `β₁`.
    pub beta_1: f32,
    /// `β₂`.
    pub beta_2: f32,
    /// `ε`.
    pub epsilon: f32,
    /// `λ`.
    pub weight_decay: f32,
}

#[derive(Clone, Copy)]
pub(super) struct Step {
    betas: [f32; 2],
    /// `1 / (1 − βᵗ)`.
    corrections: [f32; 2],
    epsilon: f32,
    keep: f32,
    rate: f32,
}

impl AdamW {
    /// Takes step `time`, the first of which is 1, with `rate`: `values`, `m` and `v` become those after it.
    ///
    /// # Errors
    /// Lengths that differ, a time of 0, a rate that is not finite.
    pub fn step(
        &self,
        rate: f64,
        time: usize,
        values: &mut [f32],
        gradient: &[f32],
        [m, v]: [&mut [f32]; 2],
    ) -> Result<(), Error> {
        const OPERATION: &str = "adamw";
        let len = values.len();
        for (name, got) in [("gradient", gradient.len()), ("m", m.len()), ("v", v.len())] {
            expect(got == len, OPERATION, name, || format!("{len} numbers, as values"), || got.to_string())?;
        }
        expect(time > 0, OPERATION, "time", || "1 or more".into(), || time.to_string())?;
        expect(rate.is_finite(), OPERATION, "rate", || "a finite number".into(), || rate.to_string())?;
        let correction = |beta: f32| 1.0 / (1.0 - beta.powi(time.min(i32::MAX as usize) as i32));
        let step = Step {
            betas: [self.beta_1, self.beta_2],
            corrections: [correction(self.beta_1), correction(self.beta_2)],
            epsilon: self.epsilon,
            keep: (1.0 - rate * f64::from(self.weight_decay)) as f32,
            rate: rate as f32,
        };
        let moments = m.chunks_mut(PIECE).zip(v.chunks_mut(PIECE));
        let pieces = values.chunks_mut(PIECE).zip(gradient.chunks(PIECE)).zip(moments);
        share_many(len, pieces, |((values, gradient), (m, v))| {
            dispatch(Update { step, values, gradient, m, v });
        });
        Ok(())
    }
}

// One step of some numbers.
operation!(Update, f32, |step: Step,
                         values: &'a mut [f32],
                         gradient: &'a [f32],
                         m: &'a mut [f32],
                         v: &'a mut [f32]| {
    let Step { betas: [b1, b2], corrections: [c1, c2], epsilon, keep, rate } = step;
    for at in (0..values.len()).step_by(V::LANES) {
        // SAFETY: forwarded to the caller; parts are checked where they are read and written.
        unsafe {
            let g = load_part::<V>(gradient, at);
            let own_m = load_part::<V>(m, at).mul_add(V::splat(b1), g.mul(V::splat(1.0 - b1)));
            let own_v = load_part::<V>(v, at).mul_add(V::splat(b2), g.mul(g).mul(V::splat(1.0 - b2)));
            store_part(own_m, m, at);
            store_part(own_v, v, at);
            let root = own_v.mul(V::splat(c2)).sqrt().add(V::splat(epsilon));
            let delta = own_m.mul(V::splat(c1)).div(root).mul(V::splat(-rate));
            store_part(load_part::<V>(values, at).mul_add(V::splat(keep), delta), values, at);
        }
    }
});
