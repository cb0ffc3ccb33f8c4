//! The working memory of the walk over the keys.

use super::super::decays::Decays;
use super::super::features::Lift;
use super::super::problem::{Problem, Unit};
use super::super::tile::linear_width;
use crate::call::Arena;
use crate::simd::Real;
use crate::simd::rows::padded;

/// Working memory of the walk over the keys.
pub(super) struct KeyBuffers<'s, T> {
    pub chunk: usize,
    /// Rows around a chunk of keys: those whose near band reaches it, and the one far row beyond each.
    pub window: usize,
    /// `φ(k)` and its transpose, chunk × head_width.
    pub k: &'s mut [T],
    pub k_columns: &'s mut [T],
    /// Values and their transpose, chunk × value_width.
    pub v: &'s mut [T],
    pub v_columns: &'s mut [T],
    /// `φ(q)` and `dN` of the window's rows, `c` and the exponent each was computed with.
    pub q: &'s mut [T],
    pub d: &'s mut [T],
    pub c: &'s mut [T],
    pub shift: &'s mut [T],
    /// `φ(q)·ρ(r)`, window × table width.
    pub relative: &'s mut [T],
    /// Weights, later their gradients: window × chunk.
    pub tile: &'s mut [T],
    /// Where weights are polynomials of `q·k`, their slopes, window × chunk, and the gradients of the columns of features that they are
    /// made of, chunk × [`linear_width`].
    pub slopes: &'s mut [T],
    pub linear: &'s mut [T],
    /// Far rows `w·[dN, c]` on their way into the running sum, chunk × value_width and chunk.
    pub far_rows: &'s mut [T],
    pub far_counts: &'s mut [T],
    /// How the sum of far rows falls from each row to the next, and what it counts for a key, chunk.
    pub far_steps: &'s mut [T],
    pub far_gains: &'s mut [T],
    pub decays: Decays<'s, T>,
    /// Under gates whose gradient is wanted, `Σ w c` over the rows that see a key, chunk.
    pub ones: &'s mut [T],
    pub state: &'s mut [T],
    pub state_columns: &'s mut [T],
    /// Whether the transpose is that of the stage.
    pub state_transposed: bool,
    pub dk: &'s mut [T],
    pub dv: &'s mut [T],
    pub running: &'s mut [T],
    pub lift: Lift<'s, T>,
}

impl<'s, T: Real> KeyBuffers<'s, T> {
    fn window(problem: &Problem<'_, T>, chunk: usize) -> usize {
        let radius = problem.radius.unwrap_or(0);
        padded::<T>(chunk + if problem.causal { radius } else { 2 * radius })
    }

    pub fn new(problem: &Problem<'_, T>, chunk: usize, arena: &mut Arena<'s, T>) -> Self {
        let window = Self::window(problem, chunk);
        let (head, value) = (problem.head_width, problem.value_width);
        Self {
            chunk,
            window,
            k: arena.take(chunk * head),
            k_columns: arena.take(chunk * head),
            v: arena.take(chunk * value),
            v_columns: arena.take(chunk * value),
            q: arena.take(window * head),
            d: arena.take(window * value),
            c: arena.take(window),
            shift: arena.take(window),
            relative: arena.take(window * problem.table_width()),
            tile: arena.take(window * chunk),
            slopes: arena.take(usize::from(problem.taylor.is_some()) * window * chunk),
            linear: arena.take(chunk * linear_width(problem)),
            far_rows: arena.take(chunk * value),
            far_counts: arena.take(chunk),
            far_steps: arena.take(chunk),
            far_gains: arena.take(chunk),
            decays: Decays::new(problem.attention, chunk, [window, chunk], arena),
            ones: arena.take(usize::from(problem.attention.gate) * chunk),
            state: arena.take(head * (value + 1)),
            state_columns: arena.take(head * value),
            state_transposed: false,
            dk: arena.take(chunk * head),
            dv: arena.take(chunk * value),
            running: arena.take(value),
            lift: Lift::new(problem, window, [false, true], arena),
        }
    }

    pub fn start(&mut self, unit: &Unit<'_, T>, problem: &Problem<'_, T>) {
        self.lift.start(problem, unit);
        self.decays.start(unit.decay);
    }
}
