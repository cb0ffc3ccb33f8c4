//! The state of an attention-free transformer: what each part of a [`State`] means here.

use std::ops::Range;

use super::keys::{KeyItems, write_item};
use super::problem::{CHUNK, Problem, check_options, reach, table_length};
use super::state_gradient::far;
use super::walk::clear;
use super::{Aft, Variant};
use crate::aft::log_sum::{PARTS as MEAN_PARTS, join};
use crate::call::{Dims, Mechanism, PARTS, Scratch, Sequence, State, StateShape, VERSION, fingerprint};
use crate::error::{Error, expect};
use crate::simd::Real;
use crate::simd::block::floor;
use crate::simd::rows::padded;

/// The parts of one head's state.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head<S> {
    /// `Σ e^{k_j − x} v_j` over the keys that windows no longer reach, `head_dim`.
    pub numerator: S,
    /// `Σ e^{k_j − x}`, `key_dim`.
    pub denominator: S,
    /// `x`, `key_dim`.
    pub exponent: S,
    /// The last keys, in a circle; −∞ where a key is ignored or before the first token.
    pub ring_keys: S,
    /// Their values; 0 where a key is ignored or before the first token.
    pub ring_values: S,
    /// Three numbers, and what fills cache lines: which row of the ring is the oldest, how many rows hold a token, and how
    /// many tokens came before, up to the table's length (0 without a table).
    pub marks: S,
}

/// Places of [`Head::marks`].
pub(super) const OLDEST: usize = 0;
pub(super) const FILLED: usize = 1;
pub(super) const POSITION: usize = 2;
pub(super) const MARKS: usize = 3;
/// Which part of a head's state they are.
const MARKS_PART: usize = 5;

impl<S> From<[S; PARTS]> for Head<S> {
    fn from([numerator, denominator, exponent, ring_keys, ring_values, marks]: [S; PARTS]) -> Self {
        Self { numerator, denominator, exponent, ring_keys, ring_values, marks }
    }
}

impl<'a, T: Real> Head<&'a [T]> {
    /// The token of `back` tokens ago (1 is the last one).
    pub fn ring_row(&self, back: usize, key_dim: usize, head_dim: usize) -> Option<(&'a [T], &'a [T])> {
        let rows = self.ring_keys.len() / key_dim.max(1);
        if back > rows {
            return None;
        }
        let row = (self.marks[OLDEST].to_f64() as usize + rows - back) % rows;
        Some((&self.ring_keys[row * key_dim..][..key_dim], &self.ring_values[row * head_dim..][..head_dim]))
    }

    /// The same in some channels, of a state without a ring and with a key for each channel.
    pub fn columns(self, columns: Range<usize>) -> Self {
        Self {
            numerator: &self.numerator[columns.clone()],
            denominator: &self.denominator[columns.clone()],
            exponent: &self.exponent[columns],
            ..self
        }
    }

    /// Into the rows of a mean.
    pub fn read(&self, mean: &mut [T]) {
        let (width, len) = (mean.len() / MEAN_PARTS, self.numerator.len());
        mean[2 * width..][..len].copy_from_slice(self.numerator);
        for (from, row) in [(self.exponent, 0), (self.denominator, 3)] {
            let to = &mut mean[row * width..][..len];
            // One key a head stands for all channels.
            if from.len() == len { to.copy_from_slice(from) } else { to.fill(from[0]) }
        }
    }
}

impl<T: Real> Head<&mut [T]> {
    /// The same to be read.
    pub fn as_ref(&self) -> Head<&[T]> {
        Head {
            numerator: &*self.numerator,
            denominator: &*self.denominator,
            exponent: &*self.exponent,
            ring_keys: &*self.ring_keys,
            ring_values: &*self.ring_values,
            marks: &*self.marks,
        }
    }

    /// From the rows of a mean without biases.
    pub fn write(&mut self, mean: &[T]) {
        let width = mean.len() / MEAN_PARTS;
        // No channels, and so no means: one exponent for all of them would have no place to come from.
        if width == 0 {
            return;
        }
        for (to, row) in [(&mut self.exponent, 0), (&mut self.numerator, 2), (&mut self.denominator, 3)] {
            let len = to.len();
            to.copy_from_slice(&mean[row * width..][..len]);
        }
    }
}

/// The sizes of the state of `aft` for calls of these sizes.
pub(super) fn shape(aft: &Aft, dims: &Dims) -> StateShape {
    let ring = reach(aft, true).0;
    let (width, key_dim) = (dims.head_dim, aft.key_dim(dims));
    StateShape {
        mechanism: aft.name(),
        version: VERSION,
        options: fingerprint(&aft.variant),
        batch: dims.batch,
        kv_heads: dims.kv_heads,
        parts: [width, key_dim, key_dim, ring * key_dim, ring * width, MARKS],
    }
    .in_lines(MARKS_PART)
}

/// The state before the first token.
pub(super) fn empty<T: Real>(aft: &Aft, dims: &Dims) -> Result<State<T>, Error> {
    check_options(aft, dims)?;
    let operation = aft.name();
    if let Variant::Local { length: None, .. } = aft.variant {
        return Err(Error::Unsupported {
            operation,
            combination: "a state with biases that belong to one call",
            mend: "give the table of biases a length, so that its rows are positions",
        });
    }
    if let Variant::Conv2d { .. } = aft.variant {
        return Err(Error::Unsupported {
            operation,
            combination: "a state of an image, whose places look both ways",
            mend: "give the call the whole image",
        });
    }
    let shape = shape(aft, dims);
    let fits = shape.batch.checked_mul(shape.kv_heads).and_then(|n| n.checked_mul(shape.head_len()));
    expect(
        fits.is_some_and(|n| n < isize::MAX as usize / size_of::<T>()),
        operation,
        "state",
        || "a size that fits the address space".into(),
        || format!("{shape:?}"),
    )?;
    let mut state = State::zeros(shape)?;
    for head in state.heads_mut().map(Head::from) {
        head.exponent.fill(floor());
        head.ring_keys.fill(T::NEG_INFINITY);
    }
    Ok(state)
}

/// Checks the sizes of a state, or of the gradient of one, whose marks have no meaning.
pub(super) fn check_sizes<T: Real>(
    aft: &Aft,
    dims: &Dims,
    state: &State<T>,
    argument: &'static str,
) -> Result<(), Error> {
    let shape = empty::<T>(aft, &Dims { batch: 0, ..*dims }).map(|_| shape(aft, dims))?;
    state.check(aft.name(), argument, shape)
}

/// Checks sizes and marks of a state that a caller gives.
pub(super) fn check<T: Real>(aft: &Aft, dims: &Dims, state: &State<T>, argument: &'static str) -> Result<(), Error> {
    let operation = aft.name();
    check_sizes(aft, dims, state, argument)?;
    let rows = reach(aft, true).0.max(1);
    for marks in state.each(MARKS_PART) {
        let whole = |x: T, limit: f64| x >= T::ZERO && x.to_f64() < limit && x.to_f64().fract() == 0.0;
        expect(
            whole(marks[OLDEST], rows as f64)
                && whole(marks[FILLED], rows as f64 + 1.0)
                && whole(marks[POSITION], (1 << 24) as f64),
            operation,
            argument,
            || {
                format!(
                    "a whole number below {rows} as the index of the ring's oldest row, and its length and position"
                )
            },
            || format!("{:?}", &marks[..MARKS]),
        )?;
    }
    Ok(())
}

/// Tokens before a state's next one, where there is a table of biases.
pub(super) fn position<T: Real>(state: &State<T>, batch: usize) -> usize {
    if state.shape().kv_heads == 0 || batch >= state.shape().batch {
        return 0;
    }
    Head::from(state.head(batch, 0)).marks[POSITION].to_f64() as usize
}

/// The marks after `tokens` more.
pub(super) fn advance<T: Real>(aft: &Aft, marks: &[T], tokens: usize) -> [T; MARKS] {
    let ring = reach(aft, true).0;
    let [oldest, filled, position] = [OLDEST, FILLED, POSITION].map(|n| marks[n].to_f64() as usize);
    let position = table_length(aft).map_or(0, |length| (position + tokens).min(length));
    [(oldest + tokens) % ring.max(1), (filled + tokens).min(ring), position].map(|n| T::from_f64(n as f64))
}

/// The state of two ranges of tokens, one after the other.
pub(super) fn combine<T: Real>(aft: &Aft, earlier: &State<T>, later: &State<T>) -> Result<State<T>, Error> {
    let width = earlier.shape().parts[0];
    let StateShape { batch, kv_heads, .. } = earlier.shape();
    let dims = Dims { batch, heads: kv_heads, kv_heads, queries: 0, keys: 0, head_dim: width, value_dim: width };
    check(aft, &dims, earlier, "earlier state")?;
    check(aft, &dims, later, "later state")?;
    let key_dim = aft.key_dim(&dims);
    let ring = reach(aft, true).0;
    let padded = padded::<T>(width);
    let mut work = vec![T::ZERO; 2 * MEAN_PARTS * padded];
    let (sum, item) = work.split_at_mut(MEAN_PARTS * padded);
    let mut combined = earlier.try_clone()?;
    for (index, mut head) in combined.heads_mut().map(Head::from).enumerate() {
        let later = Head::from(later.head(0, index));
        let tokens = later.marks[FILLED].to_f64() as usize;
        let oldest = head.marks[OLDEST].to_f64() as usize;
        clear(sum);
        head.as_ref().read(sum);
        // The earlier sight's oldest tokens leave the reach of windows, and the later one's take their places.
        for n in 0..tokens {
            let row = (oldest + n) % ring;
            let key = &mut head.ring_keys[row * key_dim..][..key_dim];
            let value = &mut head.ring_values[row * width..][..width];
            write_item(Some((&*key, &*value)), padded, item);
            join(sum, item, T::ZERO);
        }
        clear(item);
        later.read(item);
        join(sum, item, T::ZERO);
        head.write(sum);
        let [own, added] = [&*head.marks, later.marks].map(|marks| marks[POSITION].to_f64() as usize);
        let mut marks = advance(aft, head.marks, later.marks[OLDEST].to_f64() as usize);
        marks[FILLED] = T::from_f64((head.marks[FILLED].to_f64() as usize + tokens).min(ring) as f64);
        if let Some(length) = table_length(aft) {
            marks[POSITION] = T::from_f64((own + added).min(length) as f64);
        }
        head.marks[..MARKS].copy_from_slice(&marks);
        let end = marks[OLDEST].to_f64() as usize;
        for back in 1..=tokens {
            let Some((key, value)) = later.ring_row(back, key_dim, width) else { continue };
            let row = (end + ring - back) % ring;
            head.ring_keys[row * key_dim..][..key_dim].copy_from_slice(key);
            head.ring_values[row * width..][..width].copy_from_slice(value);
        }
    }
    Ok(combined)
}

/// The marks after the last key.
fn final_marks<T: Real>(problem: &Problem<'_, T>, sequence: &Sequence<'_>, kv_head: usize) -> [T; MARKS] {
    let before = problem.call.initial_state.map(|state| Head::from(state.head(sequence.batch, kv_head)));
    let zeros = [T::ZERO; MARKS];
    advance(problem.aft, before.map_or(&zeros[..], |head| head.marks), sequence.keys)
}

/// Writes the marks of the state after the last key.
pub(super) fn write_marks<T: Real>(problem: &Problem<'_, T>, state: &mut State<T>) {
    let kv_heads = problem.dims.kv_heads;
    for (index, head) in state.heads_mut().map(Head::from).enumerate() {
        head.marks[..MARKS].copy_from_slice(&final_marks(
            problem,
            &problem.sequences[index / kv_heads],
            index % kv_heads,
        ));
    }
}

/// The state after the last key, but for variants without a window: their walk through the keys has it at its end.
pub(super) fn final_state<T: Real>(problem: &Problem<'_, T>, state: &mut State<T>, scratch: &mut Scratch<T>) {
    let (mean, width) = (problem.mean(), problem.dims.head_dim);
    let (key_dim, kv_heads) = (problem.key_dim, problem.dims.kv_heads);
    let ring = reach(problem.aft, true).0;
    let mut heads: Vec<Head<&mut [T]>> = state.heads_mut().map(Head::from).collect();
    let work = scratch.take((CHUNK + 2) * mean);
    for (index, head) in heads.iter_mut().enumerate() {
        let (sequence, kv_head) = (&problem.sequences[index / kv_heads], index % kv_heads);
        let items = KeyItems::new(problem, sequence, kv_head);
        let end = sequence.keys as isize;
        let (sum, block) = work.split_at_mut(mean);
        far(problem, sequence, kv_head, sum, block);
        head.write(sum);
        let marks = final_marks(problem, sequence, kv_head);
        let oldest = marks[OLDEST].to_f64() as usize;
        head.marks[..MARKS].copy_from_slice(&marks);
        for back in 1..=ring {
            let key = end - back as isize;
            let row = (oldest + ring - back) % ring;
            let exists = key >= -(problem.ring as isize);
            let to_key = &mut head.ring_keys[row * key_dim..][..key_dim];
            match if exists { items.token(key) } else { None } {
                Some((key, value)) => {
                    to_key.copy_from_slice(key);
                    head.ring_values[row * width..][..width].copy_from_slice(value);
                }
                None => {
                    to_key.fill(T::NEG_INFINITY);
                    head.ring_values[row * width..][..width].fill(T::ZERO);
                }
            }
        }
    }
}
