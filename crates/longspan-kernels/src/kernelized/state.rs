//! The state of kernelized attention: what each part of a [`State`] means here.

use super::KernelizedAttention;
use super::features::FeatureLayout;
use crate::error::{Error, expect};
use crate::feature_map::FeatureMap;
use crate::fourier::Positions;
use crate::mechanism::Mechanism;
use crate::real::Real;
use crate::shape::Dims;
use crate::state::{PARTS, State, StateShape};

/// The parts of one head's state.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head<S> {
    /// `S = Σ φ(k_j) v_jᵀ`, `features × value_dim`.
    pub sum: S,
    /// `z = Σ φ(k_j)`, `features`.
    pub keys: S,
    /// Two numbers: the exponent subtracted from the keys so far, and which row of the ring is the oldest.
    pub marks: S,
    /// The sum of the values `v⁺ = [v, 1]` that fell out of the ring, `value_dim + 1`, or empty.
    pub far: S,
    /// The last values `v⁺`, `radius × (value_dim + 1)`, in a circle; rows before the first token and of ignored keys
    /// are 0.
    pub ring: S,
    /// How many tokens there have been, in two numbers: `high · 2²⁰ + low`; with counted Fourier positions, else empty.
    pub count: S,
}

/// Places of [`Head::marks`].
pub(super) const SHIFT: usize = 0;
pub(super) const OLDEST: usize = 1;

impl<S> From<[S; PARTS]> for Head<S> {
    fn from([sum, keys, marks, far, ring, count]: [S; PARTS]) -> Self {
        Self { sum, keys, marks, far, ring, count }
    }
}

impl<'a, T: Real> Head<&'a [T]> {
    /// The ring's row of `back` tokens ago (1 is the last one), if it reaches that far.
    pub fn ring_row(&self, back: usize, width: usize) -> Option<&'a [T]> {
        let rows = self.ring.len() / width;
        let row = (1..=rows).contains(&back).then(|| (self.marks[OLDEST].to_f64() as usize + rows - back) % rows)?;
        self.ring.get(row * width..(row + 1) * width)
    }
}

/// Tokens that the lower number of a count holds; both stay exact in `f32` up to 2⁴⁴ tokens.
const COUNT_STEP: f64 = 1_048_576.0;

impl<T: Real> Head<&[T]> {
    /// Tokens so far, or 0 where they are not counted.
    pub fn tokens(&self) -> f64 {
        if let [high, low] = *self.count { high.to_f64() * COUNT_STEP + low.to_f64() } else { 0.0 }
    }
}

impl<T: Real> Head<&mut [T]> {
    /// Tokens so far, or 0 where they are not counted.
    pub fn tokens(&self) -> f64 {
        if let [high, low] = *self.count { high.to_f64() * COUNT_STEP + low.to_f64() } else { 0.0 }
    }

    /// Notes the number of tokens, where they are counted.
    pub fn set_tokens(&mut self, tokens: f64) {
        if let [high, low] = &mut *self.count {
            *high = T::from_f64((tokens / COUNT_STEP).floor());
            *low = T::from_f64(tokens.rem_euclid(COUNT_STEP));
        }
    }
}

/// The sizes of the state of `attention` for calls of these sizes.
pub(super) fn shape<T: Real>(attention: &KernelizedAttention, dims: &Dims) -> StateShape {
    let radius = attention.score.shaw().map(|shaw| shaw.radius);
    let layout = FeatureLayout::new::<T>(dims.head_dim, &attention.score);
    let (features, weighed) = if attention.score.content() { layout.counts() } else { (0, 0) };
    let counted = attention.score.fourier().is_some_and(|fourier| fourier.positions == Positions::Counted);
    let width = dims.value_dim + 1;
    StateShape {
        mechanism: Mechanism::<T>::name(attention),
        batch: dims.batch,
        kv_heads: dims.kv_heads,
        parts: [
            features * dims.value_dim,
            weighed,
            2,
            if radius.is_some() { width } else { 0 },
            radius.unwrap_or(0) * width,
            if counted { 2 } else { 0 },
        ],
    }
}

/// The state before the first token.
pub(super) fn empty<T: Real>(attention: &KernelizedAttention, dims: &Dims) -> State<T> {
    let mut state = State::zeros(shape::<T>(attention, dims));
    if attention.feature_map == FeatureMap::Exp {
        for head in state.heads_mut().map(Head::from) {
            head.marks[SHIFT] = T::NEG_INFINITY;
        }
    }
    state
}

/// Checks sizes and marks of a state that a caller gives.
pub(super) fn check<T: Real>(
    attention: &KernelizedAttention,
    dims: &Dims,
    state: &State<T>,
    argument: &'static str,
) -> Result<(), Error> {
    let operation = Mechanism::<T>::name(attention);
    state.check(operation, argument, shape::<T>(attention, dims))?;
    let rows = attention.score.shaw().map_or(0, |shaw| shaw.radius).max(1);
    for index in 0..dims.batch * dims.kv_heads {
        let head = Head::from(state.head(0, index));
        let tokens = head.tokens();
        expect(
            tokens >= 0.0 && tokens.is_finite() && tokens.fract() == 0.0,
            operation,
            argument,
            || "a whole number of tokens so far".into(),
            || tokens.to_string(),
        )?;
        let oldest = head.marks[OLDEST].to_f64();
        expect(
            oldest >= 0.0 && oldest < rows as f64 && oldest.fract() == 0.0,
            operation,
            argument,
            || format!("a whole number below {rows} as the index of the ring's oldest row"),
            || oldest.to_string(),
        )?;
    }
    Ok(())
}
