//! What the gradient of the final state gives to the walk over the keys, and what is left of the walk for that of the
//! initial state.

use std::sync::PoisonError;

use super::super::state::{Head, SHIFT};
use super::super::summary::{Summary, SummaryRef};
use super::key_walk::KeyWalk;
use crate::simd::Real;
use crate::simd::block::{add_scaled, dot, scale_by, store};

impl<T: Real> KeyWalk<'_, '_, T> {
    /// Takes the gradients of the values of the initial ring from what they would be if nothing of their weight were gone, and writes
    /// those of the weights.
    pub fn weigh_ring(&self, first: isize, count: usize, dv: &mut [T], d_weights: &mut [T]) {
        let (Some(initial), Some(_)) = (&self.initial, &self.gates) else { return };
        let (width, value_dim) = (self.problem.value_width, self.problem.dims.value_dim);
        for n in 0..count {
            let dv = &mut dv[n * width..][..value_dim];
            if let Some(row) = initial.ring_row((-first) as usize - n, value_dim + 1) {
                d_weights[n] += dot(&row[..value_dim], dv);
                scale_by(dv, row[value_dim]);
            }
        }
    }

    /// Adds the gradient of the final state's ring to that of the values `first..first + count`; under gates also what its weights are
    /// of, to what those of keys are in all or those of the initial ring's.
    pub fn add_final_ring(&self, first: isize, count: usize, dv: &mut [T], weights: &mut [T]) {
        let (Some(state), Some(radius)) = (&self.d_final, self.problem.radius) else { return };
        let (width, value_dim) = (self.problem.value_width, self.problem.dims.value_dim);
        let oldest = self.unit.sequence.keys as isize - radius as isize;
        for n in 0..count {
            let slot = usize::try_from(first + n as isize - oldest).ok().filter(|&slot| slot < radius);
            if let Some(slot) = slot {
                let row = &state.ring[slot * (value_dim + 1)..][..value_dim];
                add_scaled(&mut dv[n * width..][..value_dim], T::ONE, row);
                if self.gates.is_some() {
                    let last = self.unit.sequence.keys as isize - 1;
                    let weight = self.unit.decay.between(first + n as isize, last);
                    weights[n] += weight * state.ring[slot * (value_dim + 1) + value_dim];
                }
            }
        }
    }

    /// Stores the gradient of the initial ring's rows at `first..first + count`, all before 0.
    pub fn store_ring(&self, first: isize, count: usize, dv: &[T], d_weights: &[T]) {
        let (Some(initial), Some(place)) = (&self.initial, self.d_initial) else { return };
        let value_dim = self.problem.dims.value_dim;
        let mut d_initial = place.lock().unwrap_or_else(PoisonError::into_inner);
        for n in 0..count {
            let back = (-first) as usize - n;
            // Rows of ignored keys, and those before the first token, are not there.
            if let Some(row) = initial.ring_place(back, value_dim + 1)
                && initial.ring[row.end - 1] != T::ZERO
            {
                let from = &dv[n * self.problem.value_width..][..value_dim];
                let to = &mut d_initial.ring[row];
                to[..value_dim].copy_from_slice(from);
                if self.gates.is_some() {
                    to[value_dim] = d_weights[n];
                }
            }
        }
    }

    /// Makes `local` the gradient of the final `S` and `z`.
    pub fn load_final(&self, local: &mut Summary<'_, T>) {
        local.clear();
        let Some(state) = self.d_final else { return };
        local.load(state, self.problem.dims.value_dim);
        // The far sum comes in by a row of its own.
        local.far().fill(T::ZERO);
        *local.count() = T::ZERO;
        if self.problem.exponential {
            let before = self.initial.map_or(T::NEG_INFINITY, |state| state.marks[SHIFT]);
            let keys = if self.problem.content { self.unit.sequence.keys } else { 0 };
            let shift = self.unit.highest(self.problem, 0, keys, before);
            if shift.is_finite() {
                *local.shift() = -shift;
            } else {
                local.clear();
            }
        }
    }

    /// Stores the gradient of the initial `S` and `z`, given the sums at key 0.
    pub fn store_content(&self, sums: SummaryRef<'_, T>) {
        let (Some(initial), Some(place)) = (&self.initial, self.d_initial) else { return };
        let (width, value_dim) = (self.problem.value_width, self.problem.dims.value_dim);
        let mut lift = T::ONE;
        if self.problem.exponential {
            let exponent = initial.marks[SHIFT] + sums.shift();
            lift = if exponent.is_finite() { exponent.exp() } else { T::ZERO };
        }
        lift *= self.unit.decay.entry();
        let mut d_initial = place.lock().unwrap_or_else(PoisonError::into_inner);
        let Head { sum, keys, .. } = &mut *d_initial;
        let layout = self.problem.layout;
        for (feature, to) in sum.chunks_exact_mut(value_dim.max(1)).enumerate() {
            store(&sums.sum()[layout.place(feature) * width..], lift, to);
        }
        for (feature, to) in keys.iter_mut().enumerate() {
            *to = sums.keys()[layout.denominator() + layout.place(feature)] * lift;
        }
    }

    /// Stores the gradient of the initial far sum, given the sums at the oldest row of the ring.
    pub fn store_far(&self, sums: SummaryRef<'_, T>) {
        let Some(place) = self.d_initial.filter(|_| self.problem.radius.is_some()) else { return };
        let value_dim = self.problem.dims.value_dim;
        let mut d_initial = place.lock().unwrap_or_else(PoisonError::into_inner);
        let far = &mut *d_initial.far;
        far[..value_dim].copy_from_slice(&sums.far()[..value_dim]);
        far[value_dim] = sums.count();
        scale_by(far, self.unit.decay.entry());
        if let Some(state) = self.d_final.filter(|_| self.unit.sequence.keys == 0) {
            // No key has let the far sum fall; it is handed on as it is.
            add_scaled(far, T::ONE, state.far);
        }
    }
}
