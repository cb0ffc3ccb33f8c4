//! The state: what each part of a [`State`] means here.

use smallvec::SmallVec;

use super::problem::{Problem, Unit};
use super::{OPERATION, Toeplitz};
use crate::call::{Dims, PARTS, SharedRows, State, StateShape, VERSION, ViewMut, fingerprint};
use crate::error::{Error, expect};
use crate::simd::block::{add_scaled, scale_by};
use crate::simd::{Real, dispatch};
use crate::toeplitz::weigh::AddOuter;

/// The parts of one head's state.
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
/// Which part of a head's state they are.
const MARKS_PART: usize = 2;

impl<S> From<[S; PARTS]> for Head<S> {
    fn from([sum, keys, marks, ring_keys, ring_exponents, ring_values]: [S; PARTS]) -> Self {
        Self { sum, keys, marks, ring_keys, ring_exponents, ring_values }
    }
}

impl<T: Real, S: std::ops::Deref<Target = [T]>> Head<S> {
    /// One of the marks that count.
    pub fn mark(&self, place: usize) -> usize {
        self.marks[place].to_f64() as usize
    }
}

/// The sizes of the state for calls of these sizes.
pub(super) fn shape(toeplitz: &Toeplitz, dims: &Dims) -> StateShape {
    let near = toeplitz.bias.near();
    let far = usize::from(toeplitz.bias.far().is_some());
    let features = toeplitz.feature_map.features(dims.head_dim);
    StateShape {
        mechanism: OPERATION,
        version: VERSION,
        options: fingerprint(&(toeplitz.feature_map, toeplitz.bias)),
        batch: dims.batch,
        kv_heads: dims.kv_heads,
        parts: [
            far * features * dims.value_dim,
            far * features,
            MARKS,
            near * features,
            if toeplitz.feature_map.is_exponential() { near } else { 0 },
            near * (dims.value_dim + 1),
        ],
    }
    .in_lines(MARKS_PART)
}

/// The state before the first token.
pub(super) fn empty<T: Real>(toeplitz: &Toeplitz, dims: &Dims) -> Result<State<T>, Error> {
    toeplitz.bias.check()?;
    let shape = shape(toeplitz, dims);
    let numbers = shape.parts.iter().try_fold(0usize, |sum, &part| sum.checked_add(part));
    let bytes =
        numbers.and_then(|n| n.checked_mul(shape.batch.max(1))?.checked_mul(shape.kv_heads.max(1))?.checked_mul(8));
    expect(
        bytes.is_some_and(|bytes| bytes < isize::MAX as usize),
        OPERATION,
        "state",
        || "a bias whose reach fits memory: all tokens that it reaches are kept".into(),
        || format!("{shape:?}"),
    )?;
    let mut state = State::zeros(shape)?;
    for head in state.heads_mut().map(Head::from) {
        head.marks[EXPONENT] = T::NEG_INFINITY;
    }
    Ok(state)
}

/// Checks sizes and marks of a state that a caller gives.
pub(super) fn check<T: Real>(
    toeplitz: &Toeplitz,
    dims: &Dims,
    state: &State<T>,
    argument: &'static str,
) -> Result<(), Error> {
    state.check(OPERATION, argument, shape(toeplitz, dims))?;
    check_marks(toeplitz, state, argument)
}

/// Checks the marks of a state of the right sizes, whose numbers may come from anywhere.
fn check_marks<T: Real>(toeplitz: &Toeplitz, state: &State<T>, argument: &'static str) -> Result<(), Error> {
    let near = toeplitz.bias.near();
    for marks in state.each(MARKS_PART) {
        let whole = |place: usize, below: usize| {
            let mark = marks[place].to_f64();
            mark >= 0.0 && mark < below as f64 && mark.fract() == 0.0
        };
        expect(
            whole(SLOT, near.max(1)) && whole(TOKENS, near + 1) && marks[EXPONENT].to_f64() < f64::INFINITY,
            OPERATION,
            argument,
            || format!("whole numbers of at most {near} tokens as marks"),
            || format!("{:?}", &marks[..MARKS]),
        )?;
    }
    Ok(())
}

/// Checks that a bias reaches back over `tokens` tokens.
pub(super) fn check_reach(toeplitz: &Toeplitz, argument: &'static str, tokens: usize) -> Result<(), Error> {
    let near = toeplitz.bias.near();
    expect(
        toeplitz.bias.far().is_some() || tokens <= near,
        OPERATION,
        argument,
        || format!("at most {near} tokens, which is as far as the bias reaches (or `Beyond::Extend`)"),
        || format!("{tokens}"),
    )
}

/// The state after two ranges of tokens: those of `later` enter that of `earlier`.
pub(super) fn combine<T: Real>(toeplitz: &Toeplitz, earlier: &State<T>, later: &State<T>) -> Result<State<T>, Error> {
    let shape = earlier.shape();
    let near = toeplitz.bias.near();
    expect(
        shape.mechanism == OPERATION && shape.parts[MARKS_PART] >= MARKS,
        OPERATION,
        "earlier state",
        || format!("a state of {OPERATION}"),
        || format!("{shape:?}"),
    )?;
    later.check(OPERATION, "later state", shape)?;
    check_marks(toeplitz, earlier, "earlier state")?;
    check_marks(toeplitz, later, "later state")?;
    for index in 0..shape.batch * shape.kv_heads {
        let [earlier, later] = [earlier, later].map(|state| Head::from(state.head(0, index)).mark(TOKENS));
        check_reach(toeplitz, "later state", earlier + later)?;
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

/// The gradients that a call takes from its final state and leaves for its initial one.
#[derive(Clone, Copy)]
pub(super) struct StateGradients<'s, T> {
    /// Of the loss with respect to the final state.
    pub last: Option<&'s State<T>>,
    /// Where that of the initial one goes, all 0 to begin with.
    pub first: Option<FirstParts<'s, T>>,
}

impl<T> StateGradients<'_, T> {
    /// A call between no states.
    pub const NONE: Self = Self { last: None, first: None };
}

/// The gradient of an initial state, to be written.
pub(super) struct FirstGradient<'a, T> {
    numbers: ViewMut<'a, T>,
    parts: [usize; PARTS],
}

impl<'a, T: Real> FirstGradient<'a, T> {
    /// Clears a state for the gradient to go into.
    pub fn new(state: &'a mut State<T>) -> Self {
        let shape = state.shape();
        state.numbers_mut().fill(T::ZERO);
        // A state's numbers belong to batch entries and key/value heads one after the other, as units do.
        Self { numbers: ViewMut::strided(state.numbers_mut(), [shape.head_len(), 0, 1]), parts: shape.parts }
    }

    /// A handle from which tasks write disjoint parts at the same time.
    pub fn shared(&mut self) -> FirstParts<'_, T> {
        FirstParts { numbers: self.numbers.shared(), parts: self.parts }
    }
}

/// Parts of the gradient of an initial state that several tasks write at once, each its own.
#[derive(Clone, Copy)]
pub(super) struct FirstParts<'s, T> {
    numbers: SharedRows<'s, T>,
    parts: [usize; PARTS],
}

impl<T: Real> FirstParts<'_, T> {
    /// `len` numbers from the `first`-th on of one part of a unit's state, in the order of [`Head`]'s.
    ///
    /// # Safety
    /// No other slice of these numbers may exist, in this thread or another.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, unit: usize, part: usize, first: usize, len: usize) -> &mut [T] {
        let start: usize = self.parts[..part].iter().sum();
        // SAFETY: forwarded to the caller.
        unsafe { self.numbers.row(unit, 0, start + first, len) }
    }
}

/// What the final state of a unit gives to the gradients of its tokens.
#[derive(Clone, Copy)]
pub(super) struct Last<'s, T> {
    /// The gradient of the state.
    pub head: Head<&'s [T]>,
    /// Tokens before this one are beyond the ring.
    pub ring_from: isize,
    /// Where key 0 goes in the ring.
    slot: isize,
    /// The exponent of the state's sums; −∞ if there is nothing in them.
    pub exponent: T,
}

impl<'s, T: Real> Last<'s, T> {
    pub fn new(problem: &Problem<'_, T>, unit: &Unit<'_, T>, gradient: &'s State<T>) -> Self {
        let keys = unit.sequence.keys as isize;
        let ring_from = keys - problem.toeplitz.bias.near() as isize;
        let mut exponent = unit.past.map_or(T::NEG_INFINITY, |past| past.head.marks[EXPONENT]);
        for key in unit.begin()..ring_from.max(unit.begin()) {
            exponent = exponent.max(match (problem.mapping.exponential, usize::try_from(key)) {
                (_, Ok(key)) if unit.ignores(key) => T::NEG_INFINITY,
                (true, Ok(_)) => problem.key_block(unit, key, key + 1).1,
                (true, Err(_)) => unit.past.and_then(|past| past.exponent(key)).unwrap_or(T::NEG_INFINITY),
                _ => T::ZERO,
            });
        }
        let head = Head::from(gradient.head(unit.sequence.batch, unit.kv_head));
        let slot = unit.past.map_or(0, |past| past.slot) as isize;
        Self { head, ring_from, slot, exponent }
    }

    /// The gradients of a ring's row: of `φ(k)` and of `[v, 1]`.
    pub fn ring_row(&self, problem: &Problem<'_, T>, key: isize) -> (&'s [T], &'s [T]) {
        let (features, width) = (problem.features, problem.dims.value_dim + 1);
        let slot = (self.slot + key).rem_euclid(problem.toeplitz.bias.near() as isize) as usize;
        (&self.head.ring_keys[slot * features..][..features], &self.head.ring_values[slot * width..][..width])
    }
}

/// Takes tokens into one head's state.
pub(super) struct Writer<'a, T: 'static> {
    near: usize,
    pub head: Head<&'a mut [T]>,
}

impl<'a, T: Real> Writer<'a, T> {
    pub fn new(near: usize, head: Head<&'a mut [T]>) -> Self {
        Self { near, head }
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
        let old = self.head.marks[EXPONENT];
        if exponent > old {
            if old > T::NEG_INFINITY {
                scale_by(self.head.sum, (old - exponent).exp());
                scale_by(self.head.keys, (old - exponent).exp());
            }
            self.head.marks[EXPONENT] = exponent;
        }
        if exponent < old { (exponent - old).exp() } else { T::ONE }
    }
}
