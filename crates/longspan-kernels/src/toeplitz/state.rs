//! The state: what each part of a [`State`] means here.

use smallvec::SmallVec;

use super::weigh::AddOuter;
use super::{OPERATION, Toeplitz};
use crate::call::{Dims, PARTS, State, StateShape, Stateful, check_count, fingerprint, is_count};
use crate::error::{Error, expect};
use crate::simd::block::{add_scaled, scale_by};
use crate::simd::{Real, dispatch};

#[derive(Debug, Clone, Copy)]
pub(super) struct Head<S> {
    /// `Σ φ(k_j) v_jᵀ` over the tokens that fell out of the ring, `features × value_dim`; empty where none may.
    pub sum: S,
    /// `Σ φ(k_j)` over the same, `features`.
    pub keys: S,
    /// Three numbers, and what fills cache lines: where the next token goes in the ring, the tokens in it, the exponent
    /// subtracted from the sums (−∞ before the first token falls out).
    pub marks: S,
    /// `φ(k)` of the last tokens, token `t` of the sequence in row `t mod near`.
    pub ring_keys: S,
    /// The exponent subtracted from each of them, under an exponential map only; −∞ for ignored keys.
    pub ring_exponents: S,
    /// Their `v⁺ = [v, 1]`; rows of ignored keys are 0.
    pub ring_values: S,
}

/// Places of [`Head::marks`].
pub(super) const SLOT: usize = 0;
pub(super) const TOKENS: usize = 1;
pub(super) const EXPONENT: usize = 2;
const MARKS: usize = 3;
const MARKS_PART: usize = 2;

impl<S> From<[S; PARTS]> for Head<S> {
    fn from([sum, keys, marks, ring_keys, ring_exponents, ring_values]: [S; PARTS]) -> Self {
        Self { sum, keys, marks, ring_keys, ring_exponents, ring_values }
    }
}

impl<T: Real, S: std::ops::Deref<Target = [T]>> Head<S> {
    pub fn mark(&self, place: usize) -> usize {
        self.marks[place].to_f64() as usize
    }
}

/// Checks that a bias reaches back over `tokens` tokens.
pub(super) fn check_reach(toeplitz: &Toeplitz, argument: &'static str, tokens: usize) -> Result<(), Error> {
    let near = toeplitz.bias.near();
    let expected = || format!("at most {near} tokens, which is as far as the bias reaches, or a clipped bias");
    expect(toeplitz.bias.far().is_some() || tokens <= near, OPERATION, argument, expected, || format!("{tokens}"))
}

impl Stateful for Toeplitz {
    fn state_shape<T: Real>(&self, dims: &Dims) -> Result<StateShape, Error> {
        self.bias.check()?;
        let near = self.bias.near();
        check_count::<T>(OPERATION, "tokens that the bias tells apart", near)?;
        let far = usize::from(self.bias.far().is_some());
        let features = self.feature_map.features(dims.head_dim);
        let options = fingerprint(self.feature_map.state_id().into_iter().chain(self.bias.state_id()));
        let parts = [
            far * features * dims.value_dim,
            far * features,
            MARKS,
            near.saturating_mul(features),
            if self.feature_map.is_exponential() { near } else { 0 },
            near.saturating_mul(dims.value_dim + 1),
        ];
        Ok(StateShape::new(OPERATION, options, dims, parts).in_lines(MARKS_PART))
    }

    fn empty_state<T: Real>(&self, dims: &Dims) -> Result<State<T>, Error> {
        dims.check(OPERATION)?;
        self.check_feature_map(dims)?;
        let mut state = State::zeros(self.state_shape::<T>(dims)?)?;
        for head in state.heads_mut().map(Head::from) {
            head.marks[EXPONENT] = T::NEG_INFINITY;
        }
        Ok(state)
    }

    fn check_marks<T: Real>(&self, state: &State<T>, argument: &'static str) -> Result<(), Error> {
        let near = self.bias.near();
        for marks in state.each(MARKS_PART) {
            let counts = is_count(marks[SLOT], near.max(1)) && is_count(marks[TOKENS], near + 1);
            let holds = counts && marks[EXPONENT].to_f64() < f64::INFINITY;
            let expected = || format!("whole numbers of at most {near} tokens as marks");
            expect(holds, OPERATION, argument, expected, || format!("{:?}", &marks[..MARKS]))?;
        }
        Ok(())
    }

    /// The state after two ranges of tokens: those of `later` enter that of `earlier`.
    fn combine<T: Real>(&self, earlier: &State<T>, later: &State<T>, _: &[&[T]]) -> Result<State<T>, Error> {
        let shape = earlier.shape();
        let near = self.bias.near();
        let holds = shape.mechanism == OPERATION && shape.parts[MARKS_PART] >= MARKS;
        expect(holds, OPERATION, "earlier state", || format!("a state of {OPERATION}"), || format!("{shape:?}"))?;
        later.check(OPERATION, "later state", shape)?;
        self.check_marks(earlier, "earlier state")?;
        self.check_marks(later, "later state")?;
        for index in 0..shape.batch * shape.kv_heads {
            let [earlier, later] = [earlier, later].map(|state| Head::from(state.head(0, index)).mark(TOKENS));
            check_reach(self, "later state", earlier + later)?;
        }
        let mut combined = earlier.try_clone()?;
        for (index, head) in combined.heads_mut().map(Head::from).enumerate() {
            let later = Head::from(later.head(0, index));
            let (slot, tokens) = (later.mark(SLOT), later.mark(TOKENS));
            let mut writer = Writer::new(near, head);
            if later.marks[EXPONENT] > T::NEG_INFINITY {
                // The later tokens fill the ring.
                while writer.head.mark(TOKENS) > 0 {
                    writer.retire();
                }
                let factor = writer.raise_far(later.marks[EXPONENT]);
                add_scaled(writer.head.keys, factor, later.keys);
                add_scaled(writer.head.sum, factor, later.sum);
            }
            if near > 0 {
                // A token stands at its number modulo `near`, and `slot` is what is known of the later ones' number.
                let first = (writer.head.mark(SLOT) + slot + near - tokens) % near;
                writer.head.marks[SLOT] = T::from_f64(first as f64);
                let (features, width) = (later.ring_keys.len() / near, later.ring_values.len() / near);
                for back in (1..=tokens).rev() {
                    let from = (slot + near - back) % near;
                    let exponent = later.ring_exponents.get(from).copied().unwrap_or(T::ZERO);
                    let (v, present) = later.ring_values[from * width..][..width].split_at(width - 1);
                    writer.push(&later.ring_keys[from * features..][..features], exponent, v, present[0]);
                }
            }
        }
        Ok(combined)
    }
}

pub(super) struct Writer<'a, T: 'static> {
    near: usize,
    pub head: Head<&'a mut [T]>,
}

impl<'a, T: Real> Writer<'a, T> {
    pub fn new(near: usize, head: Head<&'a mut [T]>) -> Self {
        Self { near, head }
    }

    /// After `tokens` more that are all far, their sums under this exponent: the ring is empty.
    pub fn restart(&mut self, tokens: usize, exponent: T) {
        if self.near > 0 {
            self.head.marks[SLOT] = T::from_f64(((self.head.mark(SLOT) + tokens) % self.near) as f64);
        }
        self.head.marks[TOKENS] = T::ZERO;
        self.head.marks[EXPONENT] = exponent;
    }

    /// Takes in a token: `φ(k)`, the exponent subtracted from it, its value, and 1 or, if it is ignored, 0. The caller
    /// has checked that there is room where the bias has no far end.
    pub fn push(&mut self, k: &[T], exponent: T, v: &[T], present: T) {
        if self.near == 0 {
            if present == T::ONE {
                self.add_far(exponent, k, v);
            }
            return;
        }
        if self.head.mark(TOKENS) == self.near {
            self.retire();
        }
        let slot = self.head.mark(SLOT);
        self.head.ring_keys[slot * k.len()..][..k.len()].copy_from_slice(k);
        if let Some(place) = self.head.ring_exponents.get_mut(slot) {
            *place = if present == T::ONE { exponent } else { T::NEG_INFINITY };
        }
        let row = &mut self.head.ring_values[slot * (v.len() + 1)..][..v.len() + 1];
        row[..v.len()].copy_from_slice(v);
        row[v.len()] = present;
        self.head.marks[SLOT] = T::from_f64(((slot + 1) % self.near) as f64);
        self.head.marks[TOKENS] += T::ONE;
    }

    /// The oldest token of the ring becomes far.
    fn retire(&mut self) {
        let (near, tokens) = (self.near, self.head.mark(TOKENS));
        let oldest = (self.head.mark(SLOT) + near - tokens) % near;
        self.head.marks[TOKENS] = T::from_f64((tokens - 1) as f64);
        let (features, width) = (self.head.ring_keys.len() / near, self.head.ring_values.len() / near);
        let exponent = self.head.ring_exponents.get(oldest).copied().unwrap_or(T::ZERO);
        let Head { ring_keys, ring_values, .. } = &self.head;
        // The rows stay where they are, out of the way of the sums.
        let k: SmallVec<[T; 128]> = SmallVec::from_slice(&ring_keys[oldest * features..][..features]);
        let row: SmallVec<[T; 128]> = SmallVec::from_slice(&ring_values[oldest * width..][..width]);
        let (v, present) = row.split_at(width - 1);
        if present[0] == T::ONE {
            self.add_far(exponent, &k, v);
        }
    }

    /// Adds `k vᵀ` and `k`, relative to `exponent`, to the far sums.
    fn add_far(&mut self, exponent: T, k: &[T], v: &[T]) {
        let factor = self.raise_far(exponent);
        add_scaled(self.head.keys, factor, k);
        dispatch(AddOuter { sum: self.head.sum, factor, x: k, y: v });
    }

    /// Brings the far sums to `exponent` if that is above theirs; returns the factor of what is relative to it.
    fn raise_far(&mut self, exponent: T) -> T {
        let Head { sum, keys, marks, .. } = &mut self.head;
        let own = &mut marks[EXPONENT];
        raise(own, [&mut **sum, &mut **keys], exponent);
        if exponent < *own { (exponent - *own).exp() } else { T::ONE }
    }
}

/// Brings sums that are relative to an exponent to another one, if that is above their own; −∞ is that of nothing.
pub(super) fn raise<T: Real>(own: &mut T, sums: [&mut [T]; 2], to: T) {
    if *own < to {
        if *own > T::NEG_INFINITY {
            sums.into_iter().for_each(|sum| scale_by(sum, (*own - to).exp()));
        }
        *own = to;
    }
}
